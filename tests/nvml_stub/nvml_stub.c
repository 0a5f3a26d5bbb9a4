/* A stand-in for libnvidia-ml.so.1 that answers from a scenario file, so that the real pynvml binding is tested.
 *
 * NVML_STUB_SCENARIO names a text file of lines "key value" (%h in it is the host name); the keys are those that the
 * functions below look up.
 *   gpu.<i>.<fact>          facts of a GPU            link.<i>.<l>.<fact>     facts of NVLink port l
 *   topo.<i>.<j>            common ancestor level     p2p.<i>.<j>             P2P status (read)
 *   field.<i>.<id>.<scope>  field value        error.<i>.<l>.<counter> NVLink error counter
 *   rc.<function>[.<i>[.<k>]]  return code instead of an answer (k: the port, or the second GPU)
 *   hang.<function>         seconds to sleep before answering
 * A fact that is not in the file is NOT_SUPPORTED, as on real hardware that lacks the feature.
 * -DOLD_DRIVER=1 leaves out functions of newer drivers, =2 also everything about NVLink: pynvml then raises
 * FUNCTION_NOT_FOUND. Layouts follow nvml.h as nvidia-ml-py 13 declares them.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef OLD_DRIVER
#define OLD_DRIVER 0
#endif

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
#define MEMORY_V2 0x02000028

typedef void *Device; /* index + 1 */
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;
typedef struct {
    uint32_t fieldId, scopeId;
    int64_t timestamp, latencyUsec;
    uint32_t valueType, nvmlReturn;
    union {
        double d;
        uint32_t ui;
        uint64_t ull;
    } value;
} FieldValue;

static char *content; /* the scenario file, lines cut into strings */
static size_t length;

static void load(void) {
    const char *path = getenv("NVML_STUB_SCENARIO");
    char own[4096], host[256];
    const char *mark = path ? strstr(path, "%h") : NULL;
    if (mark && !gethostname(host, sizeof host)) {
        snprintf(own, sizeof own, "%.*s%s%s", (int)(mark - path), path, host, mark + 2);
        path = own;
    }
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file || content) return;
    fseek(file, 0, SEEK_END);
    length = (size_t)ftell(file);
    rewind(file);
    content = malloc(length + 1);
    length = fread(content, 1, length, file);
    content[length] = 0;
    for (size_t at = 0; at < length; at++)
        if (content[at] == '\n') content[at] = 0;
    fclose(file);
}

static const char *find(const char *format, ...) {
    char key[128];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(key, sizeof key, format, args);
    va_end(args);
    for (const char *line = content; line && line < content + length; line += strlen(line) + 1)
        if (!strncmp(line, key, (size_t)size) && line[size] == ' ') return line + size + 1;
    return NULL;
}

/* The code to refuse with, or OK. Also does the sleeping. */
static int refused(const char *function, int i, int k) {
    const char *found = find("hang.%s", function);
    if (found) sleep((unsigned)atoi(found));
    found = find("rc.%s.%d.%d", function, i, k);
    if (!found) found = find("rc.%s.%d", function, i);
    if (!found) found = find("rc.%s", function);
    if (!found && i >= 0) found = find("gpu.%d.lost", i);
    return found ? atoi(found) : OK;
}

static int index_of(Device device) { return (int)(intptr_t)device - 1; }

static int number(const char *text, uint64_t *out) {
    if (!text) return NOT_SUPPORTED;
    *out = strtoull(text, NULL, 0);
    return OK;
}

static int string(const char *text, char *out, unsigned size) {
    if (!text) return NOT_SUPPORTED;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static void bus(const char *text, PciInfo *out) {
    memset(out, 0, sizeof *out);
    if (!strcmp(text, "-")) return;                                                /* hidden: an empty bus id */
    if (!strcmp(text, "garbage")) { memset(out->busId, 0x01, 8); return; }         /* hidden: unprintable */
    strncpy(out->busId, text, sizeof out->busId - 1);
    strncpy(out->busIdLegacy, text, sizeof out->busIdLegacy - 1);
    sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device);
}

#define REFUSE(i, k) do { int code_ = refused(__func__, i, k); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); REFUSE(-1, -1); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "stub error"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) { REFUSE(-1, -1); return string(find("driver"), out, size); }

int nvmlSystemGetCudaDriverVersion(int *out) {
    uint64_t value;
    REFUSE(-1, -1);
    int code = number(find("cuda"), &value);
    if (!code) *out = (int)value;
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    uint64_t value = 0;
    REFUSE(-1, -1);
    number(find("count"), &value);
    *out = (unsigned)value;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    unsigned count;
    int code = nvmlDeviceGetCount_v2(&count);
    if (code) return code;
    REFUSE((int)index, -1);
    if (index >= count) return INVALID_ARGUMENT;
    *out = (Device)(intptr_t)(index + 1);
    return OK;
}

#define STRING(function, fact)                                       \
    int function(Device device, char *out, unsigned size) {          \
        int i = index_of(device);                                    \
        REFUSE(i, -1);                                               \
        return string(find("gpu.%d." fact, i), out, size);           \
    }
STRING(nvmlDeviceGetName, "name")
STRING(nvmlDeviceGetUUID, "uuid")
STRING(nvmlDeviceGetSerial, "serial")

#define UNSIGNED(function, fact)                                     \
    int function(Device device, unsigned *out) {                     \
        int i = index_of(device);                                    \
        uint64_t value;                                              \
        REFUSE(i, -1);                                               \
        int code = number(find("gpu.%d." fact, i), &value);          \
        if (!code) *out = (unsigned)value;                           \
        return code;                                                 \
    }
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen")
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max")
UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
#if OLD_DRIVER < 1
UNSIGNED(nvmlDeviceGetNumaNodeId, "own_numa")
#endif

UNSIGNED(nvmlDeviceGetPcieReplayCounter, "pcie_replays")
UNSIGNED(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending")
UNSIGNED(nvmlDeviceGetPersistenceMode, "persistence")
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_mw")
UNSIGNED(nvmlDeviceGetPowerManagementDefaultLimit, "power_default_mw")

/* Answers that depend on one more number: the fact's name ends in it. */
#define NUMBERED(function, fact, type)                                      \
    int function(Device device, unsigned what, type *out) {  \
        int i = index_of(device);                                           \
        uint64_t value;                                                     \
        REFUSE(i, -1);                                                      \
        int code = number(find("gpu.%d." fact ".%u", i, what), &value);     \
        if (!code) *out = (type)value;                                      \
        return code;                                                        \
    }
NUMBERED(nvmlDeviceGetTemperature, "temperature", unsigned)
NUMBERED(nvmlDeviceGetTemperatureThreshold, "threshold", unsigned)
NUMBERED(nvmlDeviceGetMaxClockInfo, "clock_max", unsigned)

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, unsigned long long *out) {
    int i = index_of(device);
    uint64_t value;
    REFUSE(i, -1);
    int code = number(find("gpu.%d.ecc_errors.%u.%u", i, type, counter), &value);
    if (!code) *out = value;
    return code;
}

int nvmlDeviceGetEccMode(Device device, unsigned *current, unsigned *pending) {
    int i = index_of(device);
    uint64_t value;
    REFUSE(i, -1);
    int code = number(find("gpu.%d.ecc", i), &value);
    if (!code) *current = *pending = (unsigned)value;
    return code;
}

#if OLD_DRIVER < 2
int nvmlDeviceGetRemappedRows(Device device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failed) {
    int i = index_of(device);
    REFUSE(i, -1);
    const char *text = find("gpu.%d.remap", i);
    return text && sscanf(text, "%u %u %u %u", correctable, uncorrectable, pending, failed) == 4 ? OK : NOT_SUPPORTED;
}
#endif

int nvmlDeviceGetRetiredPages(Device device, unsigned cause, unsigned *count, unsigned long long *pages) {
    int i = index_of(device);
    uint64_t value;
    unsigned room = *count;
    REFUSE(i, -1);
    int code = number(find("gpu.%d.retired.%u", i, cause), &value);
    if (code) return code;
    *count = (unsigned)value;
    if (room < value) return INSUFFICIENT_SIZE;
    for (unsigned at = 0; pages && at < value; at++) pages[at] = at << 12;
    return OK;
}

/* The name since driver 535, and the one before. */
static int reasons(const char *function, Device device, unsigned long long *out) {
    int i = index_of(device), code = refused(function, i, -1);
    uint64_t value;
    if (!code) code = number(find("gpu.%d.throttle", i), &value);
    if (!code) *out = value;
    return code;
}
#if OLD_DRIVER < 1
int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *out) {
    return reasons(__func__, device, out);
}
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *out) {
    return reasons(__func__, device, out);
}

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpuInstance, computeInstance;
} Process;
#if OLD_DRIVER < 2
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *out) {
    int i = index_of(device);
    unsigned room = *count, found = 0;
    REFUSE(i, -1);
    const char *text = find("gpu.%d.pids", i); /* "-" for none */
    if (!text) return NOT_SUPPORTED;
    for (char *end; *text; text = end) {
        unsigned long pid = strtoul(text, &end, 10);
        if (end == text) break;
        if (found < room) out[found] = (Process){(unsigned)pid, 1ull << 30, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
#endif

#if OLD_DRIVER < 1
typedef struct {
    uint32_t version;
    int margin;
} Margin;
int nvmlDeviceGetMarginTemperature(Device device, Margin *out) {
    int i = index_of(device);
    REFUSE(i, -1);
    const char *text = find("gpu.%d.margin", i);
    if (!text) return NOT_SUPPORTED;
    out->margin = atoi(text);
    return OK;
}

typedef struct {
    uint32_t version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *out) {
    int i = index_of(device);
    uint64_t total, used = 0;
    REFUSE(i, -1);
    if (out->version != MEMORY_V2) return VERSION_MISMATCH;
    int code = number(find("gpu.%d.memory", i), &total);
    if (!code) code = number(find("gpu.%d.memory_used", i), &used);
    if (code) return code;
    out->total = total;
    out->used = used;
    out->reserved = 600ull << 20;
    out->free = total - used - out->reserved;
    return OK;
}
#endif

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *out) {
    int i = index_of(device);
    REFUSE(i, -1);
    const char *text = find("gpu.%d.bus", i);
    if (!text) return NOT_SUPPORTED;
    bus(text, out);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    int i = index_of(device);
    REFUSE(i, -1);
    const char *text = find("gpu.%d.capability", i);
    return text && sscanf(text, "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(Device device, uint64_t *out) { /* total, free, used */
    int i = index_of(device);
    REFUSE(i, -1);
    out[1] = out[2] = 0;
    number(find("gpu.%d.memory_used", i), &out[2]);
    return number(find("gpu.%d.memory", i), out);
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    int i = index_of(device);
    uint64_t value;
    REFUSE(i, -1);
    int code = number(find("gpu.%d.mig", i), &value);
    if (!code) *current = *pending = (unsigned)value;
    return code;
}

/* A list of set bits such as "0 1 2 64". */
static int bits(const char *text, unsigned words, unsigned long *out) {
    if (!text) return NOT_SUPPORTED;
    memset(out, 0, words * sizeof *out);
    for (char *end; *text; text = end) {
        unsigned long bit = strtoul(text, &end, 10);
        if (end == text) break;
        if (bit / 64 >= words) return INSUFFICIENT_SIZE;
        out[bit / 64] |= 1ul << (bit % 64);
    }
    return OK;
}

int nvmlDeviceGetCpuAffinity(Device device, unsigned words, unsigned long *out) {
    int i = index_of(device);
    REFUSE(i, -1);
    return bits(find("gpu.%d.cpus", i), words, out);
}

#if OLD_DRIVER < 1
int nvmlDeviceGetMemoryAffinity(Device device, unsigned words, unsigned long *out, unsigned scope) {
    int i = index_of(device);
    (void)scope;
    REFUSE(i, -1);
    return bits(find("gpu.%d.numa", i), words, out);
}
#endif

#define BETWEEN(function, kind, ...)                                            \
    int function(Device one, Device other, ##__VA_ARGS__, unsigned *out) {      \
        int i = index_of(one), j = index_of(other);                             \
        uint64_t value;                                                         \
        REFUSE(i, j);                                                           \
        const char *text = find(kind ".%d.%d", i, j);                           \
        int code = number(text ? text : find(kind ".%d.%d", j, i), &value);     \
        if (!code) *out = (unsigned)value;                                      \
        return code;                                                            \
    }
BETWEEN(nvmlDeviceGetTopologyCommonAncestor, "topo")
BETWEEN(nvmlDeviceGetP2PStatus, "p2p", unsigned what)

#if OLD_DRIVER < 2
static int port(const char *function, Device device, unsigned link, const char *fact, unsigned *out) {
    int i = index_of(device);
    uint64_t value;
    int code = refused(function, i, (int)link);
    if (code) return code;
    const char *ports = find("gpu.%d.ports", i);
    if (ports && link >= (unsigned)atoi(ports)) return INVALID_ARGUMENT;
    code = number(find("link.%d.%u.%s", i, link, fact), &value);
    if (!code) *out = (unsigned)value;
    return code;
}
int nvmlDeviceGetNvLinkState(Device d, unsigned l, unsigned *out) { return port(__func__, d, l, "state", out); }
int nvmlDeviceGetNvLinkVersion(Device d, unsigned l, unsigned *out) { return port(__func__, d, l, "version", out); }
int nvmlDeviceGetNvLinkCapability(Device d, unsigned l, unsigned what, unsigned *out) {
    return port(__func__, d, l, what == 0 ? "p2p" : "other", out);
}
int nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, unsigned counter, unsigned long long *out) {
    int i = index_of(device);
    uint64_t value;
    REFUSE(i, (int)link);
    int code = number(find("error.%d.%u.%u", i, link, counter), &value);
    if (!code) *out = value;
    return code;
}
#if OLD_DRIVER < 1
int nvmlDeviceGetNvLinkRemoteDeviceType(Device d, unsigned l, unsigned *out) { return port(__func__, d, l, "type", out); }
#endif
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, PciInfo *out) {
    int i = index_of(device);
    REFUSE(i, (int)link);
    const char *text = find("link.%d.%u.bus", i, link);
    if (!text) return NOT_SUPPORTED;
    bus(text, out);
    return OK;
}
#endif

int nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values) {
    int i = index_of(device);
    REFUSE(i, -1);
    for (int at = 0; at < count; at++) {
        uint64_t value = 0;
        const char *text = find("field.%d.%u.%u", i, values[at].fieldId, values[at].scopeId);
        values[at].nvmlReturn = (uint32_t)number(text, &value);
        values[at].valueType = 1;
        values[at].value.ull = value;
    }
    return OK;
}

#if OLD_DRIVER < 1
typedef struct {
    uint32_t version;
    unsigned char clusterUuid[16];
    uint32_t status, cliqueId;
    unsigned char state;
    uint32_t healthMask;
} FabricV2;
int nvmlDeviceGetGpuFabricInfoV(Device device, FabricV2 *out) {
    int i = index_of(device);
    uint64_t state, mask = 0, status = 0;
    REFUSE(i, -1);
    if (out->version != 0x02000024) return VERSION_MISMATCH; /* plays a driver that knows version 2 only */
    int code = number(find("gpu.%d.fabric", i), &state);
    if (code) return code;
    number(find("gpu.%d.fabric_mask", i), &mask);
    number(find("gpu.%d.fabric_status", i), &status);
    out->state = (unsigned char)state;
    out->healthMask = (uint32_t)mask;
    out->status = (uint32_t)status;
    return OK;
}
#endif
