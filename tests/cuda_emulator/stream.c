/* Streams, events, and the order in which things happen.
 *
 * A real GPU works while the program goes on, and nobody knows how far it is. Here nothing happens before something waits for
 * it, so that what was not waited for has not happened. CUDA_EMULATOR_SCHEDULE chooses another legal extreme: "early" runs
 * everything as soon as it may, "others-early" only what is on other streams than the one with the most work. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stream {
    struct stream *next;
    struct operation *first, **last;
    uint64_t submitted, done;
    /* Nanoseconds on the GPU's own clock. */
    double clock;
    bool early, destroyed, running;
};

struct event {
    struct stream *stream;
    /* How many operations of the stream are done when the event has happened; 0 for one that was never recorded. */
    uint64_t position;
    struct graph *captured;
    double time;
    bool untimed, blocking, destroyed, asked;
};

static struct stream *streams;
static struct stream *null_stream, *thread_stream;
static struct stream *executing;
static unsigned created;
static unsigned replays;
static uint64_t computed;

static struct stream *new_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->next = streams;
    const char *schedule = getenv("CUDA_EMULATOR_SCHEDULE");
    bool all = schedule && strcmp(schedule, "early") == 0, others = schedule && strcmp(schedule, "others-early") == 0;
    stream->early = all || (others && created > 0);
    return streams = stream;
}

struct stream *stream_of(CUstream handle) {
    struct stream **own = handle == (CUstream)2 ? &thread_stream : &null_stream;
    if (handle > (CUstream)2)
        return handle;
    if (!*own)
        *own = new_stream();
    return *own;
}

void *operation_new(size_t bytes, const char *name, CUresult (*run)(struct operation *), double nanoseconds) {
    struct operation *operation = calloc(1, bytes);
    operation->name = name;
    operation->run = run;
    operation->nanoseconds = nanoseconds;
    return operation;
}

void replay_begin(void) {
    replays++;
}

void replay_end(void) {
    replays--;
}

bool operation_is_replayed(void) {
    return replays > 0;
}

CUresult operation_run(struct operation *operation) {
    if (gpu_failure)
        return gpu_failure;
    computed += operation->computes;
    if (getenv("CUDA_EMULATOR_TRACE"))
        emulator_say("%s%s", operation_is_replayed() ? "  " : "", operation->name);
    CUresult result = operation->run(operation);
    if (executing)
        executing->clock += operation->nanoseconds;
    if (result && !gpu_failure) {
        emulator_say("%s failed on the GPU with %d", operation->name, result);
        gpu_failure = result;
    }
    return result;
}

static void run_first(struct stream *stream) {
    struct operation *operation = stream->first;
    stream->first = operation->next;
    if (!stream->first)
        stream->last = &stream->first;
    struct stream *before = executing;
    executing = stream;
    operation_run(operation);
    executing = before;
    stream->done++;
    free(operation);
}

static void run_until(struct stream *stream, uint64_t position) {
    if (stream->running)
        emulator_abort("a stream waits for itself");
    stream->running = true;
    while (stream->done < position && stream->first)
        run_first(stream);
    stream->running = false;
}

/* Lets early streams go on as far as they may without pulling others along. */
static void run_early(void) {
    for (bool moved = true; moved;) {
        moved = false;
        for (struct stream *stream = streams; stream; stream = stream->next)
            while (stream->early && !stream->running && stream->first && (!stream->first->ready || stream->first->ready(stream->first))) {
                stream->running = moved = true;
                run_first(stream);
                stream->running = false;
            }
    }
}

static bool anything_to_compute(void) {
    for (const struct stream *stream = streams; stream; stream = stream->next)
        for (const struct operation *operation = stream->first; operation; operation = operation->next)
            if (operation->computes)
                return true;
    return false;
}

/* What the program waits for: one stream up to a position, or everything. */
static CUresult wait_for(struct stream *stream, uint64_t position, bool asleep) {
    uint64_t before = computed;
    counters.synchronizations++;
    counters.spins += !asleep && (stream ? stream->done < position : anything_to_compute());
    if (stream)
        run_until(stream, position);
    else
        streams_drain();
    run_early();
    counters.drains += computed != before && !anything_to_compute();
    return gpu_failure;
}

CUresult streams_drain(void) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (!stream->running)
            run_until(stream, stream->submitted);
    return gpu_failure;
}

CUresult stream_submit(CUstream handle, void *submitted) {
    struct operation *operation = submitted;
    struct stream *stream = stream_of(handle);
    struct graph *graph = capture_of(stream);
    if (gpu_failure || !context_is_current()) {
        free(operation);
        return gpu_failure ? gpu_failure : CUDA_ERROR_INVALID_CONTEXT;
    }
    if (graph) {
        *graph->last = operation;
        graph->last = &operation->next;
        return CUDA_SUCCESS;
    }
    *stream->last = operation;
    stream->last = &operation->next;
    stream->submitted++;
    run_early();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
    LOCKED;
    (void)flags;
    *handle = new_stream();
    created++;
    return gpu_failure;
}

EXPORTED CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(handle, flags);
}

/* What was submitted still runs; handles are never used again, so that a stale one is noticed. */
EXPORTED CUresult cuStreamDestroy_v2(CUstream handle) {
    LOCKED;
    if (handle->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    handle->destroyed = true;
    run_until(handle, handle->submitted);
    return gpu_failure;
}

EXPORTED CUresult cuStreamSynchronize(CUstream handle) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    if (capture_of(stream))
        return capture_invalidate(stream);
    return wait_for(stream, stream->submitted, false);
}

EXPORTED CUresult cuCtxSynchronize(void) {
    LOCKED;
    CUresult forbidden = capture_forbids();
    if (forbidden)
        return forbidden;
    return wait_for(NULL, 0, false);
}

EXPORTED CUresult cuEventCreate(CUevent *handle, unsigned flags) {
    LOCKED;
    *handle = calloc(1, sizeof **handle);
    (*handle)->blocking = flags & 1; /* CU_EVENT_BLOCKING_SYNC */
    (*handle)->untimed = flags & 2;  /* CU_EVENT_DISABLE_TIMING */
    return gpu_failure;
}

EXPORTED CUresult cuEventDestroy_v2(CUevent event) {
    LOCKED;
    if (event->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    event->destroyed = true;
    return CUDA_SUCCESS;
}

struct marking {
    struct operation operation;
    struct event *event;
    uint64_t position;
};

static CUresult run_record(struct operation *operation) {
    struct marking *marking = (struct marking *)operation;
    if (marking->event->position == marking->position && marking->event->stream == executing)
        marking->event->time = executing->clock;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventRecord(CUevent event, CUstream handle) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    if (event->destroyed || stream->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    event->captured = capture_of(stream);
    event->asked = false;
    event->stream = stream;
    if (event->captured)
        return CUDA_SUCCESS;
    event->position = stream->submitted + 1;
    struct marking *marking = operation_new(sizeof *marking, "record", run_record, 0);
    marking->event = event;
    marking->position = event->position;
    return stream_submit(handle, marking);
}

struct waiting {
    struct operation operation;
    struct stream *other;
    uint64_t position;
};

static bool is_past(struct operation *operation) {
    const struct waiting *waiting = (struct waiting *)operation;
    return waiting->other->done >= waiting->position;
}

static CUresult run_wait(struct operation *operation) {
    struct waiting *waiting = (struct waiting *)operation;
    if (waiting->other == executing)
        return CUDA_SUCCESS;
    if (!is_past(operation))
        run_until(waiting->other, waiting->position);
    if (executing->clock < waiting->other->clock)
        executing->clock = waiting->other->clock;
    return gpu_failure;
}

EXPORTED CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    LOCKED;
    (void)flags;
    struct stream *stream = stream_of(handle);
    struct graph *graph = capture_of(stream);
    if (event->destroyed || stream->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured && event->captured == graph)
        return CUDA_SUCCESS;
    if (event->captured)
        emulator_abort("a second stream in a capture is not emulated");
    if (!event->position || emulator_setting("CUDA_EMULATOR_FORGET_WAITS", 0))
        return CUDA_SUCCESS;
    if (graph)
        return capture_invalidate(stream), CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    struct waiting *waiting = operation_new(sizeof *waiting, "wait", run_wait, 0);
    waiting->operation.ready = is_past;
    waiting->other = event->stream;
    waiting->position = event->position;
    return stream_submit(handle, waiting);
}

EXPORTED CUresult cuEventSynchronize(CUevent event) {
    LOCKED;
    if (event->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured)
        return CUDA_ERROR_CAPTURED_EVENT;
    return event->position ? wait_for(event->stream, event->position, event->blocking) : gpu_failure;
}

/* Not ready when first asked, whatever the schedule: a program that takes one answer for granted is found out. */
EXPORTED CUresult cuEventQuery(CUevent event) {
    LOCKED;
    if (event->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured)
        return CUDA_ERROR_CAPTURED_EVENT;
    counters.event_queries++;
    if (event->position && event->stream->done < event->position) {
        if (!event->asked)
            return event->asked = true, CUDA_ERROR_NOT_READY;
        run_until(event->stream, event->position);
    }
    return gpu_failure;
}

EXPORTED CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    LOCKED;
    if (start->destroyed || end->destroyed || start->untimed || end->untimed || !start->position || !end->position)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->stream->done < start->position || end->stream->done < end->position)
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((end->time - start->time) / 1e6);
    return gpu_failure;
}

EXPORTED CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
