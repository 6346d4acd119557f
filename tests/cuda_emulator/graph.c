/* Graph capture: operations submitted to a capturing stream are stored instead of queued, and run at each graph launch. */
#define _GNU_SOURCE
#include "emulator.h"

#include <pthread.h>
#include <stdlib.h>

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { NOT_CAPTURING = 0, ACTIVE = 1, INVALIDATED = 2 };

static struct capture {
    struct capture *next;
    struct stream *stream;
    struct graph *graph;
    pthread_t thread;
    int mode;
    bool lost;
} *captures;

static struct capture *find(const struct stream *stream) {
    struct capture *capture = captures;
    while (capture && capture->stream != stream)
        capture = capture->next;
    return capture;
}

struct graph *capture_of(struct stream *stream) {
    const struct capture *capture = find(stream);
    return capture ? capture->graph : NULL;
}

CUresult capture_invalidate(struct stream *stream) {
    struct capture *capture = find(stream);
    CUresult answer = capture->lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    capture->lost = true;
    return answer;
}

CUresult capture_forbids(void) {
    for (struct capture *capture = captures; capture; capture = capture->next) {
        bool own = pthread_equal(capture->thread, pthread_self());
        if (capture->mode == GLOBAL || (capture->mode == THREAD_LOCAL && own))
            return capture_invalidate(capture->stream);
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    LOCKED;
    /* The legacy stream cannot record. */
    if (!handle)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct stream *stream = stream_of(handle);
    if (find(stream) || mode < GLOBAL || mode > RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    struct capture *capture = malloc(sizeof *capture);
    struct graph *graph = calloc(1, sizeof *graph);
    graph->last = &graph->first;
    graph->handles = 1;
    *capture = (struct capture){captures, stream, graph, pthread_self(), mode, false};
    captures = capture;
    return gpu_failure;
}

EXPORTED CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    LOCKED;
    const struct capture *capture = find(stream_of(handle));
    *status = !capture ? NOT_CAPTURING : capture->lost ? INVALIDATED : ACTIVE;
    return gpu_failure;
}

static void release(struct graph *graph) {
    if (--graph->handles)
        return;
    for (struct operation *next, *operation = graph->first; operation; operation = next) {
        next = operation->next;
        free(operation);
    }
    free(graph);
}

EXPORTED CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    LOCKED;
    struct capture **at = &captures;
    struct stream *stream = stream_of(handle);
    while (*at && (*at)->stream != stream)
        at = &(*at)->next;
    *graph = NULL;
    if (!*at)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    struct capture *ended = *at;
    *at = ended->next;
    CUresult result = ended->lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : gpu_failure;
    if (result)
        release(ended->graph);
    else
        *graph = ended->graph;
    counters.captures++;
    free(ended);
    return result;
}

/* The two handles are the same object: nothing here changes an instantiated graph. */
EXPORTED CUresult cuGraphInstantiateWithFlags(CUgraph *executable, CUgraph graph, unsigned long long flags) {
    LOCKED;
    (void)flags;
    graph->handles++;
    *executable = graph;
    return gpu_failure;
}

EXPORTED CUresult cuGraphUpload(CUgraph executable, CUstream stream) {
    (void)executable;
    (void)stream;
    return gpu_failure;
}

struct replay {
    struct operation operation;
    struct graph *graph;
};

static CUresult run_graph(struct operation *operation) {
    struct graph *graph = ((struct replay *)operation)->graph;
    replay_begin();
    for (struct operation *recorded = graph->first; recorded && !gpu_failure; recorded = recorded->next)
        operation_run(recorded);
    replay_end();
    release(graph);
    return gpu_failure;
}

EXPORTED CUresult cuGraphLaunch(CUgraph executable, CUstream stream) {
    LOCKED;
    if (capture_of(stream_of(stream)))
        emulator_abort("a graph launch during capture is not emulated");
    struct replay *replay = operation_new(sizeof *replay, "graph", run_graph, 3000);
    replay->operation.computes = true;
    replay->graph = executable;
    executable->handles++;
    counters.graph_launches++;
    return stream_submit(stream, replay);
}

EXPORTED CUresult cuGraphExecDestroy(CUgraph executable) {
    LOCKED;
    release(executable);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGraphDestroy(CUgraph graph) {
    LOCKED;
    release(graph);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGraphGetNodes(CUgraph graph, void **nodes, size_t *count) {
    LOCKED;
    if (nodes)
        emulator_abort("a graph's nodes are not emulated");
    *count = 0;
    for (struct operation *recorded = graph->first; recorded; recorded = recorded->next)
        ++*count;
    return CUDA_SUCCESS;
}
