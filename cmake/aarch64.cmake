# Builds for 64-bit Arm on another machine: -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake. Debian and
# Ubuntu: apt install g++-aarch64-linux-gnu qemu-user, the latter for ctest.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
