/* What mock_server.c and load.c share: growing buffers, the clock, sockets, HTTP headers and common words. */

#ifndef COMMON_H
#define COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 16, EVENTS = 512 };

static const char *const WORDS[] = {
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were",
    "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if",
    "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make",
    "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number", "no", "way", "could",
    "people", "my", "than", "first", "water", "been", "call", "who", "oil", "its", "now", "find", "long", "down",
    "day", "did", "get", "come", "made", "may", "part", "over", "new", "sound", "take", "only", "little", "work",
    "know", "place", "year", "live", "me", "back", "give", "most", "very", "after", "thing", "our", "just", "name",
    "good", "sentence", "man", "think", "say", "great", "where", "help",
};
enum { WORD_COUNT = sizeof WORDS / sizeof *WORDS };

struct buffer {
    char *data;
    size_t length, capacity;
};

/* Part of a buffer; `at` is NULL if it is missing. */
struct span {
    const char *at;
    size_t length;
};

static inline _Noreturn void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static inline void *allocate(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (memory == NULL)
        die("calloc");
    return memory;
}

/* Make room for `more` bytes and a final zero. */
static inline void reserve(struct buffer *buffer, size_t more)
{
    size_t needed = buffer->length + more + 1, capacity = buffer->capacity ? buffer->capacity : 4096;
    if (needed <= buffer->capacity)
        return;
    while (capacity < needed)
        capacity *= 2;
    char *data = realloc(buffer->data, capacity);
    if (data == NULL)
        die("realloc");
    buffer->data = data;
    buffer->capacity = capacity;
}

static inline void append(struct buffer *buffer, const char *data, size_t length)
{
    reserve(buffer, length);
    memcpy(buffer->data + buffer->length, data, length);
    buffer->length += length;
}

static inline void append_text(struct buffer *buffer, const char *text)
{
    append(buffer, text, strlen(text));
}

__attribute__((format(printf, 2, 3))) static inline void append_format(struct buffer *buffer, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof text) {
        errno = EOVERFLOW;
        die("append_format");
    }
    append(buffer, text, (size_t)length);
}

/* Remove the first `length` bytes. */
static inline void drop(struct buffer *buffer, size_t length)
{
    buffer->length -= length;
    memmove(buffer->data, buffer->data + length, buffer->length);
}

static inline int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Allow as many open files as the system does. */
static inline void allow_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* Make `timer` expire at `at_ns` on the monotonic clock. */
static inline void set_timer(int timer, int64_t at_ns)
{
    struct itimerspec when = {.it_value = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0)
        die("timerfd_settime");
}

static inline void watch(int poll, int operation, int file, uint32_t events, void *data)
{
    struct epoll_event event = {.events = events, .data = {.ptr = data}};
    if (epoll_ctl(poll, operation, file, &event) < 0)
        die("epoll_ctl");
}

static inline void send_at_once(int file)
{
    int yes = 1;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

/* Read what has arrived. Return the number of bytes, 0 at the end of the connection, and -1 if there is nothing yet. */
static inline ssize_t receive(int file, struct buffer *buffer)
{
    reserve(buffer, READ_BYTES);
    ssize_t count = read(file, buffer->data + buffer->length, buffer->capacity - buffer->length - 1);
    if (count < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0;
    buffer->length += (size_t)count;
    return count;
}

/* Return the value of an HTTP header in `head`, which ends with an empty line. */
static inline struct span header(struct span head, const char *name)
{
    size_t length = strlen(name);
    const char *end = head.at + head.length, *line = memchr(head.at, '\n', head.length);
    while (line != NULL && ++line < end) {
        const char *next = memchr(line, '\n', (size_t)(end - line));
        if (next == NULL)
            break;
        if ((size_t)(next - line) > length && line[length] == ':' && strncasecmp(line, name, length) == 0) {
            const char *value = line + length + 1, *last = next;
            while (value < last && *value == ' ')
                value++;
            while (last > value && (last[-1] == '\r' || last[-1] == ' '))
                last--;
            return (struct span){value, (size_t)(last - value)};
        }
        line = next;
    }
    return (struct span){NULL, 0};
}

/* Return the number at the beginning of a span, or `missing`. */
static inline long number(struct span text, long missing)
{
    long value = 0;
    size_t place = 0;
    while (place < text.length && place < 18 && text.at[place] >= '0' && text.at[place] <= '9')
        value = value * 10 + text.at[place++] - '0';
    return place ? value : missing;
}

#endif
