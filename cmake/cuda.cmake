# Preset `cuda`: the GPU backend (src/kernels/cuda) becomes part of the library. Its kernels need compute capability 9.0
# or newer (bulk copies, programmatic dependent launch). KVMOSAIC_CUDA_SET chooses the fused kernels of
# src/kernels/cuda/instances.def: `smoke` for two-core machines and CI, `all` for GPU machines and releases.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "KVMOSAIC_CUDA needs nvcc, which was not found: put CUDA 12 or newer on PATH or set CUDACXX")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
    message(FATAL_ERROR "KVMOSAIC_CUDA needs CUDA 12 or newer for C++20, found ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
find_package(CUDAToolkit REQUIRED)
set(KVMOSAIC_CUDA_SET smoke CACHE STRING "fused CUDA kernels to build: smoke or all")
if(NOT KVMOSAIC_CUDA_SET MATCHES "^(smoke|all)$")
    message(FATAL_ERROR "KVMOSAIC_CUDA_SET = ${KVMOSAIC_CUDA_SET}: must be smoke or all")
endif()
# Older CMake drops the C++20 request for nvcc without a word.
set(KVMOSAIC_CUDA_FLAGS -std=c++20 --expt-relaxed-constexpr -lineinfo)

# One small file for each row of instances.def, and the table of all of them.
function(kvmosaic_cuda_instances out out_wide)
    set(source ${PROJECT_SOURCE_DIR}/src/kernels/cuda/instances.def)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
    set(files)
    set(wide_files)
    set(declarations)
    set(entries)
    file(READ ${source} text)
    string(REGEX REPLACE "#[^\n]*\n" "" text "${text}")
    string(REPLACE ";" "|" text "${text}")
    string(REGEX REPLACE "\n+" ";" rows "${text}")
    foreach(row IN LISTS rows)
        if(NOT row MATCHES "^(smoke|all) *\\| *([a-z0-9_]+) *\\| *([0-9]+) *\\| *([-0-9 ]+) *\\| *([^|]+) *\\| *([^|]+)$")
            continue()
        endif()
        set(group ${CMAKE_MATCH_1})
        set(name ${CMAKE_MATCH_2})
        set(threads ${CMAKE_MATCH_3})
        set(many_rows "${CMAKE_MATCH_4}")
        set(key "${CMAKE_MATCH_5}")
        set(value "${CMAKE_MATCH_6}")
        if(group STREQUAL "all" AND NOT KVMOSAIC_CUDA_SET STREQUAL "all")
            continue()
        endif()
        set(file ${CMAKE_CURRENT_BINARY_DIR}/attend_${name}.cu)
        file(CONFIGURE OUTPUT ${file} CONTENT "#include \"kernels/cuda/attend_instance.cuh\"
namespace kvmosaic::cuda {
AttendInstance attend_@name@() { return make_attend_instance<@key@, @value@, 1, @threads@>(\"@name@\"); }
} // namespace kvmosaic::cuda
" @ONLY)
        list(APPEND files ${file})
        string(APPEND declarations "AttendInstance attend_${name}();\n")
        string(APPEND entries "        attend_${name}(),\n")
        string(REGEX MATCHALL "[0-9]+" many_rows "${many_rows}")
        foreach(columns IN LISTS many_rows)
            set(wide ${name}_c${columns})
            set(file ${CMAKE_CURRENT_BINARY_DIR}/attend_${wide}.cu)
            if(columns EQUAL 16) # two column tiles in a warp, which takes twice the registers
                set(header attend_instance.cuh)
                set(made "make_attend_instance<${key}, ${value}, 2, 256>")
                list(APPEND files ${file})
            elseif(columns EQUAL 4) # integer products
                set(header attend_instance.cuh)
                set(made "make_attend_instance<${key}, ${value}, 1, ${threads}, true>")
                list(APPEND files ${file})
            else()
                math(EXPR half "${columns} / 32")
                set(header attend_wide_instance.cuh)
                set(made "make_wide_instance<${key}, ${value}, ${half}>")
                list(APPEND wide_files ${file})
            endif()
            file(CONFIGURE OUTPUT ${file} CONTENT "#include \"kernels/cuda/@header@\"
namespace kvmosaic::cuda {
AttendInstance attend_@wide@() { return @made@(\"@wide@\"); }
} // namespace kvmosaic::cuda
" @ONLY)
            string(APPEND declarations "AttendInstance attend_${wide}();\n")
            string(APPEND entries "        attend_${wide}(),\n")
        endforeach()
    endforeach()
    set(file ${CMAKE_CURRENT_BINARY_DIR}/attend_table.cc)
    file(CONFIGURE OUTPUT ${file} CONTENT "#include \"kernels/cuda/launch.h\"
namespace kvmosaic::cuda {
@declarations@
const std::vector<const AttendInstance*>& attend_instances() {
    static const AttendInstance rows[] = {
@entries@    };
    static const std::vector<const AttendInstance*> all = [] {
        std::vector<const AttendInstance*> v;
        for (const AttendInstance& row : rows)
            v.push_back(&row);
        return v;
    }();
    return all;
}
} // namespace kvmosaic::cuda
" @ONLY)
    list(APPEND files ${file})
    set(${out} ${files} PARENT_SCOPE)
    set(${out_wide} ${wide_files} PARENT_SCOPE)
endfunction()

# Adds the backend to the library target. Its kernels are an object library of their own, because CMake knows no flag
# for C++20 under nvcc and the library asks for it.
function(kvmosaic_add_cuda target)
    kvmosaic_cuda_instances(instances wide)
    file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/cuda/*.cu)
    add_library(kvmosaic_cuda_objects OBJECT ${kernels} ${instances})
    target_include_directories(kvmosaic_cuda_objects PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
        ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_options(kvmosaic_cuda_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${KVMOSAIC_CUDA_FLAGS}>)
    target_compile_definitions(kvmosaic_cuda_objects PRIVATE
        $<$<STREQUAL:${KVMOSAIC_CUDA_SET},smoke>:KVMOSAIC_CUDA_SMOKE>)
    set_target_properties(kvmosaic_cuda_objects PROPERTIES CUDA_STANDARD_REQUIRED OFF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:kvmosaic_cuda_objects>)
    # The kernels of many query rows use warpgroup instructions, which compute capability 9.0 alone has.
    add_library(kvmosaic_cuda_wide_objects OBJECT ${wide})
    target_include_directories(kvmosaic_cuda_wide_objects PRIVATE ${PROJECT_SOURCE_DIR}/include
        ${PROJECT_SOURCE_DIR}/src ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_options(kvmosaic_cuda_wide_objects PRIVATE ${KVMOSAIC_CUDA_FLAGS}
        -gencode=arch=compute_90a,code=sm_90a)
    set_target_properties(kvmosaic_cuda_wide_objects PROPERTIES CUDA_STANDARD_REQUIRED OFF CUDA_ARCHITECTURES OFF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:kvmosaic_cuda_wide_objects>)
    target_compile_definitions(${target} PRIVATE KVMOSAIC_WITH_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
