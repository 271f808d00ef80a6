# The patched llama.cpp that scripts/llama.sh unpacks and builds in the user's cache folder, as imported targets:
#   kvmosaic_libllama    libllama with ggml's CPU backend; links the adapter too, because the patched library calls it
#   kvmosaic_libcommon   the helpers of llama.cpp's tools (chat templates, arguments)
set(KVMOSAIC_LLAMA_DIR "" CACHE PATH "folder of the patched llama.cpp: its tree in src/, its build in build/")
if(NOT KVMOSAIC_LLAMA_DIR)
    execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/llama.sh --print-dir
        OUTPUT_VARIABLE llama_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "scripts/llama.sh --print-dir failed (${failed}); name the folder of the patched llama.cpp "
            "with -DKVMOSAIC_LLAMA_DIR=..., or configure with -DKVMOSAIC_LLAMA=OFF for the core library alone")
    endif()
    set(KVMOSAIC_LLAMA_DIR "${llama_dir}" CACHE PATH "folder of the patched llama.cpp" FORCE)
endif()

foreach(part src/src/kvmosaic_seam.h build/src/libllama.a build/common/libllama-common.a)
    if(NOT EXISTS ${KVMOSAIC_LLAMA_DIR}/${part})
        message(FATAL_ERROR "llama.cpp is not built: ${KVMOSAIC_LLAMA_DIR}/${part} is missing. Build it with\n"
            "  scripts/llama.sh\nor configure with -DKVMOSAIC_LLAMA=OFF for the core library alone")
    endif()
endforeach()
# The header was compiled into libllama.a: another one would be another interface.
file(SHA256 ${PROJECT_SOURCE_DIR}/src/llama/seam.h seam_here)
file(SHA256 ${KVMOSAIC_LLAMA_DIR}/src/src/kvmosaic_seam.h seam_there)
if(NOT seam_here STREQUAL seam_there)
    message(FATAL_ERROR "llama.cpp in ${KVMOSAIC_LLAMA_DIR} was patched with another src/llama/seam.h. Build it again with\n"
        "  scripts/llama.sh")
endif()

find_package(Threads REQUIRED)
find_package(OpenMP COMPONENTS CXX) # only for libllama's own loops: our targets do not get its flags

function(kvmosaic_import name file)
    add_library(${name} STATIC IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${KVMOSAIC_LLAMA_DIR}/build/${file})
    target_link_libraries(${name} INTERFACE ${ARGN})
endfunction()

kvmosaic_import(kvmosaic_ggml_base ggml/src/libggml-base.a ${OpenMP_CXX_LIBRARIES} Threads::Threads m)
kvmosaic_import(kvmosaic_ggml_cpu ggml/src/libggml-cpu.a kvmosaic_ggml_base ${OpenMP_CXX_LIBRARIES} Threads::Threads)
kvmosaic_import(kvmosaic_ggml ggml/src/libggml.a kvmosaic_ggml_cpu kvmosaic_ggml_base ${CMAKE_DL_LIBS})
# libllama.a calls kvmosaic::seam, kvmosaic_llama calls libllama: CMake repeats the two on the link line.
kvmosaic_import(kvmosaic_llama_archive src/libllama.a kvmosaic_llama kvmosaic_ggml)
kvmosaic_import(kvmosaic_httplib vendor/cpp-httplib/libcpp-httplib.a Threads::Threads)
kvmosaic_import(kvmosaic_common_base common/libllama-common-base.a)
kvmosaic_import(kvmosaic_common_archive common/libllama-common.a kvmosaic_common_base kvmosaic_httplib
    kvmosaic_llama_archive)

add_library(kvmosaic_libllama INTERFACE)
target_include_directories(kvmosaic_libllama SYSTEM INTERFACE ${KVMOSAIC_LLAMA_DIR}/src/include
    ${KVMOSAIC_LLAMA_DIR}/src/ggml/include)
target_link_libraries(kvmosaic_libllama INTERFACE kvmosaic_llama_archive)

add_library(kvmosaic_libcommon INTERFACE)
target_include_directories(kvmosaic_libcommon SYSTEM INTERFACE ${KVMOSAIC_LLAMA_DIR}/src/common
    ${KVMOSAIC_LLAMA_DIR}/src/vendor)
target_link_libraries(kvmosaic_libcommon INTERFACE kvmosaic_common_archive kvmosaic_libllama)
