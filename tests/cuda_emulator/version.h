/* Which versions the libraries say they are of: what the environment sets, else what they were compiled as. */
#ifndef VERSION_H
#define VERSION_H

#include <stdlib.h>

#ifndef CUBLAS
#define CUBLAS 130100
#endif
#ifndef CURAND
#define CURAND 100400
#endif

static inline int version_or(const char *setting, int compiled) {
    const char *value = getenv(setting);
    return value && *value ? atoi(value) : compiled;
}

/* Major, minor or patch, as the functions called GetProperty answer. */
static inline int version_part(int version, int part) {
    int parts[] = {version / 10000, version / 100 % 100, version % 100};
    return parts[part];
}

#endif
