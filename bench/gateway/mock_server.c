/*
 * A mock of a vLLM server that is fast enough to load a router: one thread, epoll, no model.
 *
 *     cc -O2 -std=c11 -o mock_server mock_server.c
 *     ./mock_server --port 8000 [--gap-ms 20]
 *
 * Answers /health, /v1/models, /metrics, /v1/completions and /v1/chat/completions in the form of vLLM 0.32. An output
 * has `max_tokens` tokens. The token at a position is the same in all outputs, so that a prefill and a decode server
 * generate the same first token. A stream has one event per token, every --gap-ms. With a gap of 0 all events are
 * sent at once, in writes of --write-bytes. Other responses are immediate. POST /gap/MS sets the gap of later streams.
 */

#define _GNU_SOURCE
#include "common.h"

#include <getopt.h>
#include <signal.h>

enum {
    LONGEST_HEAD = 1 << 16,
    LONGEST_BODY = 32 << 20,
    FIRST_ID = 300, /* after the special tokens and single bytes of usual vocabularies */
    BLOCK_TOKENS = 16,
    BLOCKS = 4000000,
    BYTES_PER_TOKEN = 4,
};

struct connection {
    int file; /* -1 when closed */
    bool waits_for_room; /* in the socket's buffer */
    bool ends; /* after the bytes in `out` */
    struct buffer in, out;
    size_t sent; /* bytes of `out` */
    size_t piece; /* longest write */
    size_t searched; /* bytes of `in` without the end of a head */
    /* The running stream */
    bool streams, chats, returns_ids, reports_usage;
    long prompt_tokens, tokens, made;
    char id[64];
    int64_t due_ns, gap_ns;
    size_t place; /* in `due` */
    struct connection *next_closed;
};

/* Top-level fields of a request */
enum field {
    PROMPT,
    MESSAGES,
    MAX_TOKENS,
    MAX_COMPLETION_TOKENS,
    STREAM,
    STREAM_OPTIONS,
    RETURN_IDS,
    KV_PARAMS,
    FIELDS,
};
static const char *const FIELD_NAMES[FIELDS] = {
    "prompt", "messages",       "max_tokens",       "max_completion_tokens",
    "stream", "stream_options", "return_token_ids", "kv_transfer_params",
};

static const char *model = "mock";
static long max_model_len = 1 << 20, vocab_size = 8192;
static size_t write_bytes = 4096;
static int64_t default_gap_ns;
static int poll_file, timer_file;
static long created;
static unsigned long requests, answers;
static long streams, made_tokens, seen_tokens;
static struct buffer scratch, text;
static struct connection *closed;

/* Streams that wait for their next token, as a binary heap with the earliest first */
static struct connection **due;
static size_t due_count, due_capacity;

static void place_due(struct connection *connection, size_t place)
{
    due[place] = connection;
    connection->place = place;
}

static void rise(size_t place)
{
    struct connection *moved = due[place];
    while (place > 0 && due[(place - 1) / 2]->due_ns > moved->due_ns) {
        place_due(due[(place - 1) / 2], place);
        place = (place - 1) / 2;
    }
    place_due(moved, place);
}

static void sink(size_t place)
{
    struct connection *moved = due[place];
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= due_count)
            break;
        if (child + 1 < due_count && due[child + 1]->due_ns < due[child]->due_ns)
            child++;
        if (due[child]->due_ns >= moved->due_ns)
            break;
        place_due(due[child], place);
        place = child;
    }
    place_due(moved, place);
}

static void add_due(struct connection *connection)
{
    if (due_count == due_capacity) {
        due_capacity = due_capacity ? 2 * due_capacity : 1024;
        due = realloc(due, due_capacity * sizeof *due);
        if (due == NULL)
            die("realloc");
    }
    place_due(connection, due_count++);
    rise(connection->place);
}

static void remove_due(struct connection *connection)
{
    size_t place = connection->place;
    struct connection *last = due[--due_count];
    if (last == connection)
        return;
    place_due(last, place);
    rise(place);
    sink(last->place);
}

static bool waits(const struct connection *connection)
{
    return connection->streams && connection->gap_ns > 0 && connection->made < connection->tokens;
}

static void close_connection(struct connection *connection)
{
    if (waits(connection))
        remove_due(connection);
    streams -= connection->streams;
    close(connection->file);
    connection->file = -1;
    connection->next_closed = closed; /* this round of events may still name the connection */
    closed = connection;
}

static void free_closed(void)
{
    while (closed != NULL) {
        struct connection *connection = closed;
        closed = connection->next_closed;
        free(connection->in.data);
        free(connection->out.data);
        free(connection);
    }
}

/* Send the bytes of `out`. Return false if that closed the connection. */
static bool flush(struct connection *connection)
{
    struct buffer *out = &connection->out;
    while (connection->sent < out->length) {
        size_t left = out->length - connection->sent;
        size_t length = left < connection->piece ? left : connection->piece;
        ssize_t count = send(connection->file, out->data + connection->sent, length, MSG_NOSIGNAL);
        if (count < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN) {
                close_connection(connection);
                return false;
            }
            if (!connection->waits_for_room)
                watch(poll_file, EPOLL_CTL_MOD, connection->file, EPOLLIN | EPOLLOUT, connection);
            connection->waits_for_room = true;
            return true;
        }
        connection->sent += (size_t)count;
    }
    out->length = connection->sent = 0;
    if (connection->waits_for_room)
        watch(poll_file, EPOLL_CTL_MOD, connection->file, EPOLLIN, connection);
    connection->waits_for_room = false;
    if (connection->ends && !connection->streams) {
        close_connection(connection);
        return false;
    }
    return true;
}

static void respond(struct connection *connection, const char *status, const char *type, struct buffer *body)
{
    append_format(
        &connection->out,
        "HTTP/1.1 %s\r\nserver: mock\r\ncontent-length: %zu\r\ncontent-type: %s\r\n%s\r\n",
        status,
        body->length,
        type,
        connection->ends ? "connection: close\r\n" : ""
    );
    append(&connection->out, body->data, body->length);
}

static void refuse(struct connection *connection, const char *status, const char *message)
{
    scratch.length = 0;
    append_format(
        &scratch,
        "{\"error\":{\"message\":\"%s\",\"type\":\"BadRequestError\",\"param\":null,\"code\":%ld}}",
        message,
        number((struct span){status, 3}, 400)
    );
    respond(connection, status, "application/json", &scratch);
}

/* ---- Requests ---- */

static const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* Return the end of the JSON string that begins at `at`, or NULL. */
static const char *skip_string(const char *at, const char *end)
{
    const char *quote = at;
    while ((quote = memchr(quote + 1, '"', (size_t)(end - quote - 1))) != NULL) {
        const char *slash = quote;
        while (slash[-1] == '\\')
            slash--;
        if ((quote - slash) % 2 == 0)
            return quote + 1;
    }
    return NULL;
}

/* Return the end of the JSON value that begins at `at`, or NULL. */
static const char *skip_value(const char *at, const char *end)
{
    long depth = 0;
    while (at < end) {
        char first = *at;
        if (first == '"') {
            at = skip_string(at, end);
            if (at == NULL || depth == 0)
                return at;
            continue;
        }
        if (first == '{' || first == '[')
            depth++;
        else if (first == '}' || first == ']') {
            if (depth <= 1)
                return depth ? at + 1 : at;
            depth--;
        } else if (depth == 0 && (first == ',' || first == ' ' || first == '\n' || first == '\r'))
            return at;
        at++;
    }
    return NULL;
}

/* Find the top-level fields of a JSON object. Return false if it is malformed. */
static bool read_fields(struct span body, struct span fields[FIELDS])
{
    const char *end = body.at + body.length, *at = skip_space(body.at, end);
    memset(fields, 0, FIELDS * sizeof *fields);
    if (at == end || *at++ != '{')
        return false;
    for (;;) {
        at = skip_space(at, end);
        if (at < end && *at == '}')
            return true;
        if (at == end || *at != '"')
            return false;
        const char *name = at + 1;
        if ((at = skip_string(at, end)) == NULL)
            return false;
        size_t length = (size_t)(at - name - 1);
        at = skip_space(at, end);
        if (at == end || *at++ != ':')
            return false;
        const char *value = skip_space(at, end);
        if (value == end || (at = skip_value(value, end)) == NULL)
            return false;
        for (size_t field = 0; field < FIELDS; field++)
            if (strlen(FIELD_NAMES[field]) == length && memcmp(FIELD_NAMES[field], name, length) == 0)
                fields[field] = (struct span){value, (size_t)(at - value)};
        at = skip_space(at, end);
        if (at < end && *at == ',')
            at++;
    }
}

static bool is_true(struct span value)
{
    return value.length == 4 && memcmp(value.at, "true", 4) == 0;
}

/* Whether the object `value` has a field `name` that is true. */
static bool has_true(struct span value, const char *name)
{
    if (value.at == NULL)
        return false;
    const char *end = value.at + value.length, *at = memmem(value.at, value.length, name, strlen(name));
    if (at == NULL)
        return false;
    at += strlen(name);
    while (at < end && (*at == '"' || *at == ':' || *at == ' '))
        at++;
    return end - at >= 4 && memcmp(at, "true", 4) == 0;
}

static bool is_list(struct span prompt)
{
    return prompt.at != NULL && *prompt.at == '[';
}

static long count_tokens(struct span prompt)
{
    if (!is_list(prompt))
        return (long)prompt.length / BYTES_PER_TOKEN + 1;
    long count = 1;
    for (size_t place = 0; place < prompt.length; place++)
        count += prompt.at[place] == ',';
    return count;
}

/* ---- Responses ---- */

static long token_at(long position)
{
    return FIRST_ID + (position * 7919 + 13) % (vocab_size - FIRST_ID);
}

static void append_prompt_ids(struct buffer *out, struct span prompt, long tokens)
{
    /* Lists of token ids begin alike, so the longest one is kept: to format it takes longer than all the rest. */
    static struct buffer ids, ends; /* `ends`: the length of `ids` after each token */
    if (is_list(prompt)) {
        append(out, prompt.at, prompt.length);
        return;
    }
    for (long position = (long)(ends.length / sizeof ids.length); position < tokens; position++) {
        append_format(&ids, "%c%ld", position ? ',' : '[', token_at(position));
        append(&ends, (const char *)&ids.length, sizeof ids.length);
    }
    if (tokens > 0) {
        size_t end;
        memcpy(&end, ends.data + (size_t)(tokens - 1) * sizeof end, sizeof end);
        append(out, ids.data, end);
    }
    append_text(out, "]");
}

/* Fields of all responses: id, kind, time, model. */
static void append_beginning(struct buffer *out, const struct connection *connection, const char *kind)
{
    append_format(
        out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%ld,\"model\":\"%s\"", connection->id, kind, created, model
    );
}

static void append_usage(struct buffer *out, const struct connection *connection)
{
    append_format(
        out,
        ",\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld}",
        connection->prompt_tokens,
        connection->prompt_tokens + connection->tokens,
        connection->tokens
    );
}

static void append_kv_params(struct buffer *out, const struct connection *connection)
{
    append_text(out, ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false");
    append_text(out, ",\"remote_block_ids\":[[");
    for (long block = 0; block <= connection->prompt_tokens / BLOCK_TOKENS; block++)
        append_format(out, "%s%ld", block ? "," : "", block);
    append_format(
        out,
        "]],\"remote_engine_id\":\"6f1c1e2d-0000-4000-8000-%012d\",\"remote_request_id\":\"%s\","
        "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"remote_num_tokens\":%ld}",
        (int)getpid(),
        connection->id,
        connection->prompt_tokens
    );
}

static const char *kind_of_event(const struct connection *connection)
{
    return connection->chats ? "chat.completion.chunk" : "text_completion";
}

/* Append `event` as one chunk of the response. */
static void append_chunk(struct connection *connection, const struct buffer *event)
{
    append_format(&connection->out, "%zx\r\n", event->length);
    append(&connection->out, event->data, event->length);
    append_text(&connection->out, "\r\n");
}

static void append_token(struct connection *connection, struct span prompt)
{
    long token = token_at(connection->made);
    const char *word = WORDS[connection->made % WORD_COUNT];
    bool last = connection->made + 1 == connection->tokens;
    scratch.length = 0;
    append_text(&scratch, "data: ");
    append_beginning(&scratch, connection, kind_of_event(connection));
    if (connection->chats) {
        append_format(
            &scratch,
            ",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" %s\"},\"logprobs\":null,\"finish_reason\":%s",
            word,
            last ? "\"length\",\"stop_reason\":null" : "null"
        );
    } else {
        append_format(
            &scratch,
            ",\"choices\":[{\"index\":0,\"text\":\" %s\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,"
            "\"prompt_token_ids\":",
            word,
            last ? "\"length\"" : "null"
        );
        if (connection->returns_ids && connection->made == 0)
            append_prompt_ids(&scratch, prompt, connection->prompt_tokens);
        else
            append_text(&scratch, "null");
    }
    if (connection->returns_ids)
        append_format(&scratch, ",\"token_ids\":[%ld]}]}\n\n", token);
    else
        append_text(&scratch, ",\"token_ids\":null}]}\n\n");
    append_chunk(connection, &scratch);
    connection->made++;
    made_tokens++;
}

static void append_end(struct connection *connection)
{
    if (connection->reports_usage) {
        scratch.length = 0;
        append_text(&scratch, "data: ");
        append_beginning(&scratch, connection, kind_of_event(connection));
        append_text(&scratch, ",\"choices\":[]");
        append_usage(&scratch, connection);
        append_text(&scratch, "}\n\n");
        append_chunk(connection, &scratch);
    }
    append_text(&connection->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    connection->streams = false;
    streams--;
    answers++;
}

static void begin_stream(struct connection *connection, struct span prompt)
{
    connection->streams = true;
    connection->made = 0;
    connection->gap_ns = default_gap_ns;
    connection->piece = write_bytes;
    streams++;
    append_text(
        &connection->out,
        "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    );
    if (connection->chats) {
        scratch.length = 0;
        append_text(&scratch, "data: ");
        append_beginning(&scratch, connection, kind_of_event(connection));
        append_text(
            &scratch,
            ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
            "\"finish_reason\":null}],\"prompt_token_ids\":"
        );
        if (connection->returns_ids)
            append_prompt_ids(&scratch, prompt, connection->prompt_tokens);
        else
            append_text(&scratch, "null");
        append_text(&scratch, "}\n\n");
        append_chunk(connection, &scratch);
    }
    do
        append_token(connection, prompt);
    while (connection->made < connection->tokens && connection->gap_ns == 0);
    if (connection->made == connection->tokens) {
        append_end(connection);
        return;
    }
    connection->due_ns = now_ns() + connection->gap_ns;
    add_due(connection);
}

static void answer_whole(struct connection *connection, struct span prompt, bool keeps_kv)
{
    struct buffer *out = &scratch;
    out->length = text.length = 0;
    for (long position = 0; position < connection->tokens; position++)
        append_format(&text, " %s", WORDS[position % WORD_COUNT]);
    append_beginning(out, connection, connection->chats ? "chat.completion" : "text_completion");
    append_text(out, ",\"choices\":[{\"index\":0,");
    append_text(out, connection->chats ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    append(out, text.data, text.length);
    append_text(out, connection->chats ? "\"}" : "\"");
    append_text(out, ",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":");
    if (connection->returns_ids) {
        for (long position = 0; position < connection->tokens; position++)
            append_format(out, "%c%ld", position ? ',' : '[', token_at(position));
        append_text(out, "],\"prompt_token_ids\":");
        append_prompt_ids(out, prompt, connection->prompt_tokens);
    } else {
        append_text(out, "null,\"prompt_token_ids\":null");
    }
    append_text(out, "}]");
    append_usage(out, connection);
    if (keeps_kv)
        append_kv_params(out, connection);
    else
        append_text(out, ",\"kv_transfer_params\":null");
    append_text(out, "}");
    connection->piece = SIZE_MAX;
    made_tokens += connection->tokens;
    answers++;
    respond(connection, "200 OK", "application/json", out);
}

static void complete(struct connection *connection, struct span body, bool chats)
{
    struct span fields[FIELDS];
    if (!read_fields(body, fields)) {
        refuse(connection, "400 Bad Request", "the body is not a JSON object");
        return;
    }
    struct span prompt = fields[chats ? MESSAGES : PROMPT];
    if (prompt.at == NULL) {
        refuse(connection, "400 Bad Request", "the prompt is missing");
        return;
    }
    if (chats && is_list(prompt))
        prompt = (struct span){prompt.at + 1, prompt.length - 1}; /* a list of messages, not of token ids */
    connection->chats = chats;
    connection->prompt_tokens = count_tokens(prompt);
    connection->tokens = number(fields[MAX_TOKENS], number(fields[MAX_COMPLETION_TOKENS], 16));
    connection->returns_ids = is_true(fields[RETURN_IDS]);
    connection->reports_usage = has_true(fields[STREAM_OPTIONS], "include_usage");
    if (connection->tokens < 1 || connection->prompt_tokens + connection->tokens > max_model_len) {
        refuse(connection, "400 Bad Request", "max_tokens must be at least 1 and, with the prompt, fit the context");
        return;
    }
    const char *prefix = chats ? "chatcmpl" : "cmpl";
    snprintf(connection->id, sizeof connection->id, "%s-%08x%024lx", prefix, (unsigned)getpid(), requests++);
    seen_tokens += connection->prompt_tokens;
    if (is_true(fields[STREAM]))
        begin_stream(connection, prompt);
    else
        answer_whole(connection, prompt, has_true(fields[KV_PARAMS], "do_remote_decode"));
}

static void report_metrics(struct connection *connection)
{
    const struct {
        const char *name, *kind;
        double value;
    } metrics[] = {
        {"num_requests_running", "gauge", (double)streams},
        {"num_requests_waiting", "gauge", 0},
        {"kv_cache_usage_perc", "gauge", 0},
        {"prompt_tokens_total", "counter", (double)seen_tokens},
        {"generation_tokens_total", "counter", (double)made_tokens},
        {"iteration_tokens_total_count", "counter", (double)made_tokens},
        {"request_prompt_tokens_sum", "counter", (double)seen_tokens},
        {"request_prompt_tokens_count", "counter", (double)answers},
        {"request_prefill_time_seconds_sum", "counter", (double)seen_tokens * 1e-6},
        {"request_prefill_kv_computed_tokens_sum", "counter", (double)seen_tokens},
        {"request_prefill_kv_computed_tokens_count", "counter", (double)answers},
    };
    scratch.length = 0;
    for (size_t place = 0; place < sizeof metrics / sizeof *metrics; place++)
        append_format(
            &scratch,
            "# TYPE vllm:%s %s\nvllm:%s{engine=\"0\",model_name=\"%s\"} %.6f\n",
            metrics[place].name,
            metrics[place].kind,
            metrics[place].name,
            model,
            metrics[place].value
        );
    append_format(
        &scratch,
        "# TYPE vllm:cache_config_info gauge\n"
        "vllm:cache_config_info{block_size=\"%d\",engine=\"0\",num_gpu_blocks=\"%d\"} 1.0\n",
        BLOCK_TOKENS,
        BLOCKS
    );
    respond(connection, "200 OK", "text/plain; version=0.0.4; charset=utf-8", &scratch);
}

static void report_models(struct connection *connection)
{
    scratch.length = 0;
    append_format(
        &scratch,
        "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":%ld,\"owned_by\":\"vllm\","
        "\"root\":\"%s\",\"parent\":null,\"max_model_len\":%ld,\"permission\":[]}]}",
        model,
        created,
        model,
        max_model_len
    );
    respond(connection, "200 OK", "application/json", &scratch);
}

static bool is(struct span line, const char *start)
{
    return line.length >= strlen(start) && memcmp(line.at, start, strlen(start)) == 0;
}

static void answer(struct connection *connection, struct span head, struct span body)
{
    connection->piece = SIZE_MAX;
    scratch.length = 0;
    if (is(head, "POST /v1/completions "))
        complete(connection, body, false);
    else if (is(head, "POST /v1/chat/completions "))
        complete(connection, body, true);
    else if (is(head, "GET /health ")) /* with an empty body, as vLLM */
        respond(connection, "200 OK", "text/plain", &scratch);
    else if (is(head, "GET /v1/models "))
        report_models(connection);
    else if (is(head, "GET /metrics "))
        report_metrics(connection);
    else if (is(head, "POST /gap/")) {
        default_gap_ns = (int64_t)(strtod(head.at + strlen("POST /gap/"), NULL) * 1e6);
        respond(connection, "200 OK", "text/plain", &scratch);
    } else
        refuse(connection, "404 Not Found", "no such path");
}

/* Answer the requests in `in`, one after the other. */
static void process(struct connection *connection)
{
    while (connection->file >= 0 && !connection->streams && !connection->ends && connection->in.length > 0) {
        struct buffer *in = &connection->in;
        const char *empty = memmem(in->data + connection->searched, in->length - connection->searched, "\r\n\r\n", 4);
        if (empty == NULL) {
            connection->searched = in->length > 3 ? in->length - 3 : 0;
            if (in->length > LONGEST_HEAD)
                close_connection(connection);
            return;
        }
        connection->searched = (size_t)(empty - in->data);
        struct span head = {in->data, connection->searched + 4};
        long length = number(header(head, "content-length"), 0);
        if (length > LONGEST_BODY || header(head, "transfer-encoding").at != NULL) {
            connection->ends = true;
            refuse(connection, "413 Content Too Large", "the body must have a content-length of at most 32 MiB");
            flush(connection);
            return;
        }
        size_t whole = head.length + (size_t)length;
        if (in->length < whole) {
            reserve(in, whole - in->length);
            return;
        }
        struct span closes = header(head, "connection");
        connection->ends = closes.length == 5 && strncasecmp(closes.at, "close", 5) == 0;
        answer(connection, head, (struct span){in->data + head.length, (size_t)length});
        drop(in, whole);
        connection->searched = 0;
        if (!flush(connection))
            return;
    }
}

static void on_readable(struct connection *connection)
{
    ssize_t count = receive(connection->file, &connection->in);
    if (count == 0)
        close_connection(connection);
    else if (count > 0)
        process(connection);
}

/* Make the tokens that are due. */
static void on_timer(void)
{
    uint64_t expired;
    if (read(timer_file, &expired, sizeof expired) < 0 && errno != EAGAIN)
        die("read");
    int64_t now = now_ns();
    while (due_count > 0 && due[0]->due_ns <= now) {
        struct connection *connection = due[0];
        append_token(connection, (struct span){NULL, 0});
        if (connection->made < connection->tokens) {
            connection->due_ns += connection->gap_ns;
            sink(0);
            flush(connection);
        } else {
            remove_due(connection);
            append_end(connection);
            if (flush(connection))
                process(connection);
        }
    }
}

static void accept_all(int listener)
{
    for (;;) {
        int file = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (file < 0) {
            if (errno == EAGAIN)
                return;
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            die("accept4");
        }
        send_at_once(file);
        struct connection *connection = allocate(sizeof *connection);
        connection->file = file;
        connection->piece = SIZE_MAX;
        watch(poll_file, EPOLL_CTL_ADD, file, EPOLLIN, connection);
    }
}

static int listen_on(const char *host, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) {
        errno = EINVAL;
        die("--host");
    }
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 4096) < 0)
        die("listen");
    return listener;
}

int main(int count, char **arguments)
{
    static const struct option options[] = {
        {"host", required_argument, NULL, 'h'},        {"port", required_argument, NULL, 'p'},
        {"gap-ms", required_argument, NULL, 'g'},      {"model", required_argument, NULL, 'm'},
        {"vocab-size", required_argument, NULL, 'v'},  {"max-model-len", required_argument, NULL, 'l'},
        {"write-bytes", required_argument, NULL, 'w'}, {NULL, 0, NULL, 0},
    };
    const char *host = "127.0.0.1";
    int port = 8000, option;
    while ((option = getopt_long(count, arguments, "", options, NULL)) != -1) {
        switch (option) {
        case 'h': host = optarg; break;
        case 'p': port = atoi(optarg); break;
        case 'g': default_gap_ns = (int64_t)(strtod(optarg, NULL) * 1e6); break;
        case 'm': model = optarg; break;
        case 'v': vocab_size = atol(optarg); break;
        case 'l': max_model_len = atol(optarg); break;
        case 'w': write_bytes = (size_t)atol(optarg); break;
        default: return 2;
        }
    }
    if (vocab_size <= FIRST_ID || write_bytes == 0 || strlen(model) > 200) {
        fprintf(stderr, "--vocab-size must exceed %d, --write-bytes 0, and --model has up to 200 bytes\n", FIRST_ID);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    allow_files();
    created = (long)time(NULL);
    poll_file = epoll_create1(EPOLL_CLOEXEC);
    timer_file = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll_file < 0 || timer_file < 0)
        die("epoll_create1");
    int listener = listen_on(host, port);
    watch(poll_file, EPOLL_CTL_ADD, listener, EPOLLIN, &listener);
    watch(poll_file, EPOLL_CTL_ADD, timer_file, EPOLLIN, &timer_file);
    int64_t set_ns = 0;
    for (;;) {
        struct epoll_event events[EVENTS];
        int64_t earliest_ns = due_count ? due[0]->due_ns : 0;
        if (earliest_ns != set_ns && earliest_ns)
            set_timer(timer_file, earliest_ns);
        set_ns = earliest_ns;
        int ready = epoll_wait(poll_file, events, EVENTS, -1);
        for (int place = 0; place < ready; place++) {
            void *source = events[place].data.ptr;
            if (source == &listener)
                accept_all(listener);
            else if (source == &timer_file) {
                on_timer();
                set_ns = 0; /* expired */
            } else {
                struct connection *connection = source;
                if (connection->file >= 0 && events[place].events & EPOLLOUT && flush(connection))
                    process(connection);
                if (connection->file >= 0 && events[place].events & ~(uint32_t)EPOLLOUT)
                    on_readable(connection);
            }
        }
        free_closed();
    }
}
