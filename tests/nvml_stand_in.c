/* A stand-in for NVML, the driver's management library: one GPU, whose state is what NVML_STAND_IN says, such as
 * "pcie_width=8,pcie_max_width=16". What is not named there is not supported. Processes: "processes=pid:bytes+pid:bytes". */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} process;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory;

static const char *setting(const char *name) {
    size_t length = strlen(name);
    for (const char *at = getenv("NVML_STAND_IN"); at && *at; at = strchr(at, ','), at += at != NULL)
        if (!strncmp(at, name, length) && at[length] == '=')
            return at + length + 1;
    return NULL;
}

static int number(const char *name, unsigned *value) {
    const char *text = setting(name);
    if (!text)
        return NOT_SUPPORTED;
    *value = (unsigned)strtoul(text, NULL, 10);
    return SUCCESS;
}

static int wide(const char *name, unsigned long long *value) {
    const char *text = setting(name);
    if (!text)
        return NOT_SUPPORTED;
    *value = strtoull(text, NULL, 10);
    return SUCCESS;
}

int nvmlInit_v2(void) { return setting("unloaded") ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "Error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    const char *own = setting("uuid");
    *device = (void *)1;
    return own && !strncmp(own, uuid, strlen(uuid)) ? SUCCESS : NOT_FOUND;
}

#define READS(function, name) \
    int function(void *device, unsigned *value) { return (void)device, number(name, value); }
READS(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
READS(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
READS(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_generation")
READS(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width")
READS(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
READS(nvmlDeviceGetPowerManagementDefaultLimit, "power_default")
READS(nvmlDeviceGetPersistenceMode, "persistence")
READS(nvmlDeviceGetPowerUsage, "power")

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    return (void)device, sensor == 0 ? number("celsius", celsius) : NOT_SUPPORTED;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned percent[2]) {
    return (void)device, percent[1] = 0, number("utilization", percent);
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory *found) {
    (void)device;
    return wide("memory", &found->total) == SUCCESS ? wide("memory_used", &found->used) : NOT_SUPPORTED;
}

int nvmlDeviceGetClockInfo(void *device, int domain, unsigned *mhz) {
    return (void)device, domain == 1 ? number("sm_mhz", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxClockInfo(void *device, int domain, unsigned *mhz) {
    return (void)device, domain == 1 ? number("max_sm_mhz", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    return (void)device, wide("slowed_by", reasons);
}

int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
    (void)device;
    return number("ecc", current) == SUCCESS ? number("ecc", pending) : NOT_SUPPORTED;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    return (void)device, kind == 1 && counter == 0 ? wide("ecc_errors", count) : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *found) {
    (void)device;
    const char *text = setting("processes");
    unsigned room = *count, there = 0, pid;
    unsigned long long bytes;
    if (!text)
        return NOT_SUPPORTED;
    for (; sscanf(text, "%u:%llu", &pid, &bytes) == 2; text += strcspn(text, "+,"), text += *text == '+', there++)
        if (found && there < room)
            found[there] = (process){pid, bytes, 0, 0};
    *count = there;
    return there > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process *found) {
    (void)device, (void)found;
    *count = 0;
    return SUCCESS;
}
