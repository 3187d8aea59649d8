/*
 * A load generator for OpenAI-compatible completion endpoints: one thread, epoll.
 *
 *     cc -O2 -std=c11 -o load load.c
 *     ./load --port 8000 --model mock --connections 64 --seconds 5 --prompt-bytes 1000 --tokens 64 --stream
 *
 * Closed loop: each of --connections sends its next request when its last one has ended. The first requests are spread
 * over --ramp-ms. Open loop, with --rate: requests are due at even intervals, and latencies count from the due time,
 * also if all connections are busy. After --seconds no requests are sent, and those under way are awaited.
 *
 * Prints a JSON object: counts of requests, errors, tokens (as reported by the server) and events with text; the
 * seconds from the start to the last response; requests that were due but unsent; and percentiles of the time to the first byte of a body (TTFB) and of
 * the whole request, in ms.
 */

#define _GNU_SOURCE
#include "common.h"

#include <getopt.h>
#include <signal.h>

enum { RETRY_NS = 10000000, LONGEST_WAIT_MS = 100, BEGINNINGS = 1 << 20 };

enum state { UNCONNECTED, IDLE, HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER };

struct connection {
    int file; /* -1 when closed */
    enum state state;
    bool waits_for_room, reused, has_chunks, succeeded, seen_end, seen_done;
    struct buffer out, in, line;
    size_t sent;
    size_t left; /* bytes of the body, or of the chunk */
    int64_t begun_ns, first_ns;
    long tokens, events;
};

struct samples {
    double *values;
    size_t count, capacity;
};

static int poll_file, timer_file;
static struct sockaddr_in address;
static const char *model = "mock", *key;
static long connection_count = 64, prompt_bytes = 1000, shared_bytes, tokens = 1, stops;
static double rate, seconds = 5, ramp_ms, timeout_s = 60;
static bool streams, chats;
static uint64_t random_state = 88172645463325252;

static struct connection *connections, **idle;
static size_t idle_count;
static struct buffer body, shared;
static int64_t start_ns, end_ns, last_ns;
static int64_t next_due_ns, due_number; /* open loop */
static long under_way, sent_count, completed, errors, token_count, event_count;
static struct samples ttfb, total;
static char first_error[200];

static uint64_t draw(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void add_sample(struct samples *samples, int64_t ns)
{
    if (samples->count == samples->capacity) {
        samples->capacity = samples->capacity ? 2 * samples->capacity : 1 << 16;
        samples->values = realloc(samples->values, samples->capacity * sizeof *samples->values);
        if (samples->values == NULL)
            die("realloc");
    }
    samples->values[samples->count++] = (double)ns / 1e6;
}

/* ---- Requests ---- */

static void append_words(struct buffer *out, size_t bytes)
{
    size_t end = out->length + bytes;
    reserve(out, bytes + 16);
    while (out->length < end) {
        const char *word = WORDS[draw() % WORD_COUNT];
        append(out, word, strlen(word));
        append(out, " ", 1);
    }
    out->length = end;
}

/* Append a random part of a text that is drawn once: long prompts would take this core longer than the router's. */
static void append_prompt(struct buffer *out, size_t bytes)
{
    static struct buffer drawn;
    if (drawn.length == 0)
        append_words(&drawn, BEGINNINGS + (size_t)prompt_bytes);
    append(out, drawn.data + draw() % BEGINNINGS, bytes);
}

static void write_request(struct connection *connection)
{
    body.length = 0;
    append_format(&body, "{\"model\":\"%s\",", model);
    append_text(&body, chats ? "\"messages\":[{\"role\":\"user\",\"content\":\"" : "\"prompt\":\"");
    append(&body, shared.data, shared.length);
    append_prompt(&body, (size_t)prompt_bytes - shared.length);
    append_text(&body, chats ? "\"}]" : "\"");
    append_format(&body, ",\"max_tokens\":%ld,\"temperature\":0,\"ignore_eos\":true", tokens);
    if (stops > 0) {
        append_text(&body, ",\"stop\":[");
        for (long stop = 0; stop < stops; stop++)
            append_format(&body, "%s\"\\n\\n### end %ld\"", stop ? "," : "", stop); /* occurs in no output */
        append_text(&body, "]");
    }
    append_text(&body, streams ? ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}" : "}");
    struct buffer *out = &connection->out;
    out->length = connection->sent = 0;
    append_format(
        out,
        "POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n",
        chats ? "/v1/chat/completions" : "/v1/completions",
        body.length
    );
    if (key != NULL)
        append_format(out, "authorization: Bearer %s\r\n", key);
    append_text(out, "\r\n");
    append(out, body.data, body.length);
}

/* ---- Connections ---- */

static void make_idle(struct connection *connection)
{
    idle[idle_count++] = connection;
}

static void disconnect(struct connection *connection)
{
    if (connection->file >= 0)
        close(connection->file);
    connection->file = -1;
    connection->waits_for_room = false;
    connection->state = UNCONNECTED;
}

static void begin(struct connection *connection, int64_t due_ns);

/* End the request of a connection, which then sends the next one or becomes idle. */
static void finish(struct connection *connection, bool succeeded, bool keeps)
{
    int64_t now = now_ns();
    last_ns = now;
    under_way--;
    if (succeeded) {
        completed++;
        token_count += connection->tokens;
        event_count += connection->events;
        add_sample(&ttfb, connection->first_ns - connection->begun_ns);
        add_sample(&total, now - connection->begun_ns);
    } else {
        errors++;
    }
    connection->state = IDLE;
    connection->reused = true;
    if (!keeps)
        disconnect(connection);
    if (rate == 0 && now < end_ns && succeeded)
        begin(connection, now);
    else
        make_idle(connection); /* after an error too: the timer starts it again */
}

static void fail(struct connection *connection, const char *reason)
{
    if (first_error[0] == 0) {
        size_t length = strlen(reason) < sizeof first_error - 1 ? strlen(reason) : sizeof first_error - 1;
        for (size_t place = 0; place < length; place++) {
            char each = reason[place];
            first_error[place] = each < ' ' || each == '"' || each == '\\' || each > '~' ? ' ' : each;
        }
    }
    finish(connection, false, false);
}

static void flush(struct connection *connection)
{
    struct buffer *out = &connection->out;
    while (connection->sent < out->length) {
        size_t left = out->length - connection->sent;
        ssize_t count = send(connection->file, out->data + connection->sent, left, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno != EAGAIN)
            return; /* the reading side sees the end of the connection, or the response that was its reason */
        if (count < 0) {
            if (!connection->waits_for_room)
                watch(poll_file, EPOLL_CTL_MOD, connection->file, EPOLLIN | EPOLLOUT, connection);
            connection->waits_for_room = true;
            return;
        }
        connection->sent += (size_t)count;
    }
    if (connection->waits_for_room)
        watch(poll_file, EPOLL_CTL_MOD, connection->file, EPOLLIN, connection);
    connection->waits_for_room = false;
}

static void open_and_send(struct connection *connection)
{
    if (connection->file < 0) {
        connection->reused = false;
        connection->file = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (connection->file < 0)
            die("socket");
        send_at_once(connection->file);
        if (connect(connection->file, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
            fail(connection, strerror(errno));
            return;
        }
        watch(poll_file, EPOLL_CTL_ADD, connection->file, EPOLLIN, connection);
    }
    connection->state = HEAD;
    connection->in.length = connection->line.length = connection->sent = 0;
    connection->seen_end = connection->seen_done = connection->succeeded = false;
    connection->first_ns = connection->tokens = connection->events = 0;
    flush(connection);
}

static void begin(struct connection *connection, int64_t due_ns)
{
    write_request(connection);
    connection->begun_ns = due_ns;
    under_way++;
    sent_count++;
    open_and_send(connection);
}

/* ---- Responses ---- */

static bool has_text(const char *line, size_t length, const char *name)
{
    const char *end = line + length, *at = memmem(line, length, name, strlen(name));
    if (at == NULL)
        return false;
    at += strlen(name);
    while (at < end && (*at == ':' || *at == ' '))
        at++;
    return end - at >= 2 && at[0] == '"' && at[1] != '"';
}

/* Read one event of a stream, or a whole JSON response. */
static void read_line(struct connection *connection, const char *line, size_t length)
{
    static const char data[] = "data:", done[] = "[DONE]";
    static const char used[] = "\"completion_tokens\"", reason[] = "\"finish_reason\"";
    if (length == 0 || connection->seen_done)
        return;
    if (streams) {
        if (length < sizeof data || memcmp(line, data, sizeof data - 1) != 0)
            return;
        if (memmem(line, length < 16 ? length : 16, done, sizeof done - 1) != NULL) {
            connection->seen_done = true;
            return;
        }
    }
    if (has_text(line, length, reason))
        connection->seen_end = true;
    connection->events += has_text(line, length, chats ? "\"content\"" : "\"text\"");
    const char *count = memmem(line, length, used, sizeof used - 1);
    if (count != NULL) {
        count += sizeof used - 1;
        while (count < line + length && (*count == ':' || *count == ' '))
            count++;
        connection->tokens = number((struct span){count, (size_t)(line + length - count)}, connection->tokens);
    }
}

/* Split the body into lines. */
static void read_body(struct connection *connection, const char *data, size_t length)
{
    if (length == 0)
        return;
    if (connection->first_ns == 0)
        connection->first_ns = now_ns();
    const char *end = data + length, *next;
    while ((next = memchr(data, '\n', (size_t)(end - data))) != NULL) {
        if (connection->line.length > 0) {
            append(&connection->line, data, (size_t)(next - data));
            read_line(connection, connection->line.data, connection->line.length);
            connection->line.length = 0;
        } else {
            read_line(connection, data, (size_t)(next - data));
        }
        data = next + 1;
    }
    if (data < end)
        append(&connection->line, data, (size_t)(end - data));
}

static void end_body(struct connection *connection)
{
    struct buffer *line = &connection->line;
    append(line, "", 1); /* a final zero, for the error message */
    line->length--;
    bool whole = connection->sent == connection->out.length;
    if (!connection->succeeded) {
        fail(connection, line->length ? line->data : "a status other than 200");
        return;
    }
    read_line(connection, line->data, line->length);
    if (!connection->seen_end || connection->tokens != tokens || connection->seen_done != streams) {
        fail(connection, "an incomplete output");
        return;
    }
    if (connection->first_ns == 0)
        connection->first_ns = now_ns();
    finish(connection, true, whole);
}

/* Read the head of a response at the beginning of `in`. Return its length, 0 if it is incomplete. */
static size_t read_head(struct connection *connection)
{
    struct buffer *in = &connection->in;
    const char *empty = memmem(in->data, in->length, "\r\n\r\n", 4);
    if (empty == NULL)
        return 0;
    struct span head = {in->data, (size_t)(empty - in->data) + 4};
    connection->succeeded = head.length > 12 && memcmp(head.at + 9, "200", 3) == 0;
    connection->has_chunks = header(head, "transfer-encoding").at != NULL;
    connection->left = (size_t)number(header(head, "content-length"), 0);
    connection->state = connection->has_chunks ? CHUNK_SIZE : BODY;
    return head.length;
}

/* Read what has arrived. Return the number of bytes read, or -1 at the end of the response. */
static ssize_t read_response(struct connection *connection)
{
    struct buffer *in = &connection->in;
    size_t at = 0;
    for (;;) {
        const char *data = in->data + at, *line;
        size_t rest = in->length - at, length;
        switch (connection->state) {
        case HEAD:
            if ((length = read_head(connection)) == 0)
                return (ssize_t)at;
            at += length;
            break;
        case BODY:
        case CHUNK:
            length = rest < connection->left ? rest : connection->left;
            read_body(connection, data, length);
            at += length;
            connection->left -= length;
            if (connection->left > 0)
                return (ssize_t)at;
            if (connection->state == BODY)
                return -1;
            connection->state = CHUNK_END;
            break;
        case CHUNK_END:
            if (rest < 2)
                return (ssize_t)at;
            at += 2;
            connection->state = CHUNK_SIZE;
            break;
        case CHUNK_SIZE:
            if ((line = memchr(data, '\n', rest)) == NULL)
                return (ssize_t)at;
            connection->left = strtoul(data, NULL, 16);
            at += (size_t)(line - data) + 1;
            connection->state = connection->left ? CHUNK : TRAILER;
            break;
        case TRAILER:
            if ((line = memchr(data, '\n', rest)) == NULL)
                return (ssize_t)at;
            at += (size_t)(line - data) + 1;
            if (line - data <= 1)
                return -1;
            break;
        default:
            return (ssize_t)at;
        }
    }
}

static void on_readable(struct connection *connection)
{
    ssize_t count = receive(connection->file, &connection->in);
    if (count < 0)
        return;
    if (connection->state == IDLE || connection->state == UNCONNECTED) {
        disconnect(connection); /* the server closed an idle connection */
        return;
    }
    if (count == 0) {
        bool untouched = connection->state == HEAD && connection->in.length == 0;
        disconnect(connection);
        if (untouched && connection->reused)
            open_and_send(connection); /* closed just as it was reused */
        else
            fail(connection, "the connection was closed");
        return;
    }
    ssize_t used = read_response(connection);
    if (used < 0) {
        end_body(connection);
    } else {
        drop(&connection->in, (size_t)used);
    }
}

/* ---- Schedule ---- */

/* Return when the next request is due, 0 for never. */
static int64_t next_due(void)
{
    int64_t due_ns;
    if (rate > 0)
        due_ns = start_ns + (int64_t)((double)due_number * 1e9 / rate);
    else if (due_number < connection_count)
        due_ns = start_ns + (int64_t)((double)due_number * 1e6 * ramp_ms / (double)connection_count);
    else
        due_ns = idle_count ? now_ns() + RETRY_NS : 0; /* connections that failed */
    return due_ns < end_ns ? due_ns : 0;
}

static void send_due(void)
{
    int64_t now = now_ns();
    while (idle_count > 0 && next_due_ns && next_due_ns <= now) {
        begin(idle[--idle_count], rate > 0 ? next_due_ns : now);
        due_number++;
        next_due_ns = next_due();
    }
    if (now >= end_ns)
        next_due_ns = 0;
    else if (next_due_ns == 0)
        next_due_ns = next_due();
}

static void run(void)
{
    int64_t set_ns = 0, limit_ns = end_ns + (int64_t)(timeout_s * 1e9);
    next_due_ns = next_due();
    do {
        send_due();
        /* Without an idle connection, the end of a request sends the next one. */
        int64_t wake_ns = next_due_ns && idle_count > 0 ? next_due_ns : limit_ns;
        if (wake_ns != set_ns)
            set_timer(timer_file, wake_ns);
        set_ns = wake_ns;
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poll_file, events, EVENTS, LONGEST_WAIT_MS);
        for (int place = 0; place < ready; place++) {
            struct connection *connection = events[place].data.ptr;
            if (connection == NULL) {
                uint64_t expired;
                if (read(timer_file, &expired, sizeof expired) < 0 && errno != EAGAIN)
                    die("read");
                set_ns = 0;
                continue;
            }
            if (connection->file >= 0 && events[place].events & EPOLLOUT)
                flush(connection);
            if (connection->file >= 0 && events[place].events & ~(uint32_t)EPOLLOUT)
                on_readable(connection);
        }
    } while ((under_way > 0 || now_ns() < end_ns) && now_ns() < limit_ns);
}

/* ---- Report ---- */

static int compare(const void *left, const void *right)
{
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

/* Return a percentile, linearly interpolated, of sorted samples. */
static double percentile(const struct samples *samples, double percent)
{
    if (samples->count == 0)
        return 0;
    double place = percent / 100 * (double)(samples->count - 1);
    size_t below = (size_t)place, above = below + 1 < samples->count ? below + 1 : below;
    return samples->values[below] + (place - (double)below) * (samples->values[above] - samples->values[below]);
}

static void report_samples(const char *name, struct samples *samples)
{
    if (samples->count > 0)
        qsort(samples->values, samples->count, sizeof *samples->values, compare);
    printf(
        ",\"%s\":{\"p50\":%.4f,\"p90\":%.4f,\"p99\":%.4f}",
        name,
        percentile(samples, 50),
        percentile(samples, 90),
        percentile(samples, 99)
    );
}

static void report(void)
{
    /* Requests that were due, while all connections were busy until the end */
    long unsent = rate > 0 && (long)(rate * seconds) > due_number ? (long)(rate * seconds) - (long)due_number : 0;
    printf(
        "{\"sent\":%ld,\"requests\":%ld,\"errors\":%ld,\"tokens\":%ld,\"events\":%ld,\"seconds\":%.4f,\"error\":\"%s\"",
        sent_count,
        completed,
        errors + under_way,
        token_count,
        event_count,
        (double)((last_ns ? last_ns : now_ns()) - start_ns) / 1e9,
        first_error[0] == 0 && under_way ? "no response in time" : first_error
    );
    printf(",\"unsent\":%ld", unsent);
    report_samples("ttfb_ms", &ttfb);
    report_samples("total_ms", &total);
    printf("}\n");
}

int main(int count, char **arguments)
{
    static const struct option options[] = {
        {"host", required_argument, NULL, 'h'},         {"port", required_argument, NULL, 'p'},
        {"model", required_argument, NULL, 'm'},        {"key", required_argument, NULL, 'k'},
        {"connections", required_argument, NULL, 'c'},  {"rate", required_argument, NULL, 'r'},
        {"seconds", required_argument, NULL, 's'},      {"ramp-ms", required_argument, NULL, 'a'},
        {"prompt-bytes", required_argument, NULL, 'b'}, {"shared-bytes", required_argument, NULL, 'B'},
        {"tokens", required_argument, NULL, 't'},       {"stops", required_argument, NULL, 'S'},
        {"stream", no_argument, NULL, 'x'},             {"chat", no_argument, NULL, 'C'},
        {"seed", required_argument, NULL, 'd'},         {"timeout", required_argument, NULL, 'T'},
        {NULL, 0, NULL, 0},
    };
    const char *host = "127.0.0.1";
    int port = 8000, option;
    while ((option = getopt_long(count, arguments, "", options, NULL)) != -1) {
        switch (option) {
        case 'h': host = optarg; break;
        case 'p': port = atoi(optarg); break;
        case 'm': model = optarg; break;
        case 'k': key = optarg; break;
        case 'c': connection_count = atol(optarg); break;
        case 'r': rate = strtod(optarg, NULL); break;
        case 's': seconds = strtod(optarg, NULL); break;
        case 'a': ramp_ms = strtod(optarg, NULL); break;
        case 'b': prompt_bytes = atol(optarg); break;
        case 'B': shared_bytes = atol(optarg); break;
        case 't': tokens = atol(optarg); break;
        case 'S': stops = atol(optarg); break;
        case 'x': streams = true; break;
        case 'C': chats = true; break;
        case 'd': random_state ^= strtoull(optarg, NULL, 10) * 0x9e3779b97f4a7c15; break;
        case 'T': timeout_s = strtod(optarg, NULL); break;
        default: return 2;
        }
    }
    if (connection_count < 1 || prompt_bytes < 1 || shared_bytes < 0 || shared_bytes > prompt_bytes || tokens < 1) {
        fprintf(stderr, "--connections, --prompt-bytes and --tokens are at least 1; --shared-bytes begin a prompt\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    allow_files();
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) {
        fprintf(stderr, "--host %s is not an IPv4 address\n", host);
        return 2;
    }
    poll_file = epoll_create1(EPOLL_CLOEXEC);
    timer_file = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll_file < 0 || timer_file < 0)
        die("epoll_create1");
    watch(poll_file, EPOLL_CTL_ADD, timer_file, EPOLLIN, NULL);
    connections = allocate((size_t)connection_count * sizeof *connections);
    idle = allocate((size_t)connection_count * sizeof *idle);
    for (long place = connection_count; place-- > 0;) {
        connections[place].file = -1;
        make_idle(&connections[place]);
    }
    uint64_t unique = random_state;
    random_state = 1; /* shared beginnings do not depend on the seed */
    append_words(&shared, (size_t)shared_bytes);
    random_state = unique;
    start_ns = now_ns();
    end_ns = start_ns + (int64_t)(seconds * 1e9);
    run();
    report();
    return 0;
}
