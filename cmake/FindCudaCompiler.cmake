# anychip_find_cuda(REASON): enables the language CUDA, or leaves in REASON why it cannot.
#
# nvcc is looked for in CUDACXX, on PATH, in CUDA_HOME and /usr/local/cuda, and in the wheels of PyPI
# (nvidia-cuda-nvcc and the four it needs), in this order.

# The wheels put nvcc under site-packages/nvidia/cu13; the linker looks into lib64, the wheels have lib.
function(anychip_nvcc_of_wheels result)
  set(${result} "" PARENT_SCOPE)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
    "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(GLOB found "${packages}/nvidia/cu*/bin/nvcc")
  if(found)
    list(SORT found COMPARE NATURAL ORDER DESCENDING)
    list(GET found 0 nvcc)
    get_filename_component(toolkit "${nvcc}/../.." ABSOLUTE)
    if(NOT EXISTS "${toolkit}/lib64" AND EXISTS "${toolkit}/lib")
      file(CREATE_LINK lib "${toolkit}/lib64" SYMBOLIC)
    endif()
    set(${result} "${nvcc}" PARENT_SCOPE)
  endif()
endfunction()

macro(anychip_find_cuda reason)
  # CMAKE_CUDA_COMPILER must stay unset: check_language would then not look whether it works.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(ANYCHIP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda
      PATH_SUFFIXES bin NO_CACHE)
    if(NOT ANYCHIP_NVCC)
      anychip_nvcc_of_wheels(ANYCHIP_NVCC)
    endif()
    if(ANYCHIP_NVCC)
      set(ENV{CUDACXX} "${ANYCHIP_NVCC}")
    endif()
  endif()
  # Ampere and Hopper, and code for the driver to compile on what comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
      set(${reason} "the kernels need nvcc 12.0 or later, got ${CMAKE_CUDA_COMPILER_VERSION}")
    endif()
  elseif(DEFINED ENV{CUDACXX})
    set(${reason} "nvcc at $ENV{CUDACXX} does not work (see CMakeFiles/CMakeConfigureLog.yaml)")
  else()
    set(${reason} "no nvcc was found (put it on PATH, set CUDACXX or CUDA_HOME, or pip install \
nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm nvidia-cuda-cccl)")
  endif()
endmacro()
