"""Small C libraries with the symbols of NVIDIA's, made where a test wants one to answer."""

import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = """
#include <string.h>
#include <stddef.h>
int cuDriverGetVersion(int* v) { *v = VERSION; return 0; }
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDeviceGetCount(int* n) { *n = COUNT; return 0; }
int cuDeviceGet(int* device, int index) { *device = 7 * index; return index < COUNT ? 0 : 101; }
int cuDeviceGetName(char* name, int room, int device) {
  strncpy(name, device ? "NVIDIA T4" : "NVIDIA H200", room);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* n, int device) { *n = 150000000000; return device % 7; }
int cuDeviceGetAttribute(int* v, int what, int device) {
  *v = what == 16 ? 132 : what == 20 ? MODE : what == 75 ? (device ? 7 : 9) : device ? 5 : 0;
  return what == 16 || what == 20 || what == 75 || what == 76 ? 0 : 1;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : 0;
  return code == 100 ? 0 : 1;
}
"""

NVML = """
#include <string.h>
typedef struct { unsigned f, s; long long t, l; int type, ret; union { unsigned ui; double d; } v; }
    Value;
static int started = 0;
int nvmlInit_v2(void) { started += 1; return INIT; }
int nvmlShutdown(void) { started -= 1; return 0; }
int nvmlSystemGetDriverVersion(char* v, unsigned n) {
  strncpy(v, "580.65.06", n);
  return started == 1 ? 0 : 1;
}
#ifndef OLD
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  *device = (void*)5;
  return strcmp(uuid, "GPU-abc") == 0 ? 0 : 6;
}
int nvmlDeviceGetMaxClockInfo(void* d, int type, unsigned* mhz) {
  *mhz = 3201;
  return d == (void*)5 && type == 2 ? 0 : 1;
}
int nvmlDeviceGetMemoryBusWidth(void* d, unsigned* bits) { *bits = 6144; return BUS; }
int nvmlDeviceGetMigMode(void* d, unsigned* now, unsigned* next) { *now = 0; *next = 1; return 0; }
int nvmlDeviceGetNvLinkState(void* d, unsigned link, unsigned* on) {
  *on = link < 17;
  return link < 18 ? 0 : 2;
}
int nvmlDeviceGetFieldValues(void* d, int n, Value* v) {
  v->v.ui = 25000;
  v->ret = v->f == 90 ? 0 : 2;
  return n == 1 ? 0 : 2;
}
#endif
"""


def library(folder: Path, source: str, **constants: int) -> str:
    """Compiles a library and returns its path; a test without a compiler is skipped."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler was found")
    made = folder / "library.so"
    given = [f"-D{name}={value}" for name, value in constants.items()]
    command = [compiler, "-shared", "-fPIC", *given, "-x", "c", "-", "-o", str(made)]
    subprocess.run(command, input=source.encode(), check=True, capture_output=True)
    return str(made)
