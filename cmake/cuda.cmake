# Preset `cuda`. There are no CUDA kernels in this version. What this checks today is that an engine written in CUDA
# can include every public header: each is compiled alone by nvcc, then all of them together with host code that
# calls the library (tests/cuda_headers).
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "KVMOSAIC_CUDA needs nvcc, which was not found: put CUDA 12 or newer on PATH or set CUDACXX")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
    message(FATAL_ERROR "KVMOSAIC_CUDA needs CUDA 12 or newer for C++20, found ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
