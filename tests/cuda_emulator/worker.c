/* The process that runs kernels: worker.py, started with the first launch, asked through a socket.
 *
 * A request is two 32-bit numbers, its kind and the bytes that follow. Only a launch is answered: a CUresult, the bytes of a text
 * and the text, which says what went wrong. */
#define _GNU_SOURCE
#include "emulator.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAP = 1, UNMAP = 2, LEARN = 3, LAUNCH = 4 };

static int connection = -1;
static pid_t worker;
extern char **environ;

static bool send_all(const void *data, size_t bytes) {
    for (const char *at = data; bytes;) {
        ssize_t sent = send(connection, at, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        at += sent;
        bytes -= (size_t)sent;
    }
    return true;
}

static bool receive_all(void *data, size_t bytes) {
    for (char *at = data; bytes;) {
        ssize_t received = recv(connection, at, bytes, 0);
        if (received < 0 && errno == EINTR)
            continue;
        if (received <= 0)
            return false;
        at += received;
        bytes -= (size_t)received;
    }
    return true;
}

static bool request(uint32_t kind, const void *data, uint32_t bytes) {
    uint32_t head[2] = {kind, bytes};
    return send_all(head, sizeof head) && send_all(data, bytes);
}

static void map_existing(CUdeviceptr first_page, uint64_t bytes) {
    uint64_t range[2] = {first_page, bytes};
    request(MAP, range, sizeof range);
}

/* What the program finds its libraries by must not lead the worker's libraries to this driver. */
static char **environment_of_worker(void) {
    size_t count = 0, kept = 0;
    while (environ[count])
        count++;
    char **own = calloc(count + 1, sizeof *own);
    for (size_t index = 0; index < count; index++)
        if (strncmp(environ[index], "LD_", 3) != 0)
            own[kept++] = environ[index];
    return own;
}

static void start(void) {
    const char *python = getenv("CUDA_EMULATOR_PYTHON"), *script = getenv("CUDA_EMULATOR_WORKER");
    int ends[2];
    if (!python || !script)
        emulator_abort("CUDA_EMULATOR_PYTHON and CUDA_EMULATOR_WORKER say who runs kernels");
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        emulator_abort("no socket for the worker");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", 0, 0);
    posix_spawn_file_actions_adddup2(&actions, 2, 1);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
    posix_spawn_file_actions_adddup2(&actions, memory_file(), 4);
    /* A terminal's Ctrl-C reaches the worker too, which has to live until the program has saved. */
    posix_spawnattr_t attributes;
    sigset_t ignored;
    sigemptyset(&ignored);
    sigaddset(&ignored, SIGINT);
    sigaddset(&ignored, SIGTERM);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &ignored);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    char *arguments[] = {(char *)python, (char *)script, NULL}, **own = environment_of_worker();
    if (posix_spawnp(&worker, python, &actions, &attributes, arguments, own))
        emulator_abort("cannot start %s %s", python, script);
    free(own);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    connection = ends[0];
    memory_visit(map_existing);
}

void worker_map(CUdeviceptr first_page, uint64_t bytes, bool mapped) {
    uint64_t range[2] = {first_page, bytes};
    if (connection >= 0)
        request(mapped ? MAP : UNMAP, range, sizeof range);
}

void worker_learn(uint32_t kernel, const char *entry, const char *text) {
    if (connection < 0)
        start();
    size_t name = strlen(entry) + 1, length = strlen(text), bytes = sizeof kernel + name + length;
    char *data = malloc(bytes);
    memcpy(data, &kernel, sizeof kernel);
    memcpy(data + sizeof kernel, entry, name);
    memcpy(data + sizeof kernel + name, text, length);
    request(LEARN, data, (uint32_t)bytes);
    free(data);
}

CUresult worker_launch(const struct launch *launch, const char *entry) {
    struct {
        int32_t result;
        uint32_t bytes;
    } answer;
    bool sent = request(LAUNCH, launch, (uint32_t)(sizeof *launch + launch->count * sizeof *launch->values));
    if (!sent || !receive_all(&answer, sizeof answer)) {
        int status = 0;
        waitpid(worker, &status, 0);
        emulator_say("the worker ended in %s%s", entry, WIFSIGNALED(status) ? ", touching memory that is not there" : "");
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (answer.bytes) {
        char *text = calloc(1, answer.bytes + 1);
        receive_all(text, answer.bytes);
        emulator_say("%s: %s", entry, text);
        free(text);
    }
    return answer.result;
}
