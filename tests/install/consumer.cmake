# Script of the test install.consumer; its variables come from CMakeLists.txt beside it.
function(step)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE out)
    if(NOT code EQUAL 0)
        string(REPLACE ";" " " line "${ARGN}")
        message(FATAL_ERROR "failed (${code}): ${line}\n${out}")
    endif()
    set(output "${out}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
# A prefix with a space and a moved one: the package must not remember where it was built.
set(first "${WORK_DIR}/first prefix")
set(prefix "${WORK_DIR}/moved prefix")
step(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${first} --component core)
file(RENAME ${first} ${prefix})

set(flags "")
if(SANITIZE)
    set(flags "-fsanitize=${SANITIZE}")
endif()
step(${CMAKE_COMMAND} -G ${GENERATOR} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build -DCMAKE_CXX_COMPILER=${CXX}
     -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_FLAGS=${flags})
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
step(${WORK_DIR}/build/consumer f32 f16 kivi:bits=4 mixkvq)
message("${output}")

# spec, bytes, true bits, times smaller, error: every row is there, and more bits never cost accuracy here.
function(error_of spec out)
    string(REGEX MATCH "\n${spec} +([0-9]+) +([0-9.]+) +([0-9.]+)x +([0-9.e+-]+)\n" row "\n${output}")
    if(NOT row)
        message(FATAL_ERROR "no row for ${spec}")
    endif()
    set(${out} ${CMAKE_MATCH_4} PARENT_SCOPE)
endfunction()
function(expect_less low high)
    # CMake compares decimals but not exponents: both have the form d.dde-dd.
    string(REGEX MATCH "^([0-9.]+)e([+-][0-9]+)$" all "${low}")
    set(low_mantissa ${CMAKE_MATCH_1})
    set(low_exponent ${CMAKE_MATCH_2})
    string(REGEX MATCH "^([0-9.]+)e([+-][0-9]+)$" all "${high}")
    if(low_exponent GREATER CMAKE_MATCH_2 OR (low_exponent EQUAL CMAKE_MATCH_2 AND NOT low_mantissa LESS CMAKE_MATCH_1))
        message(FATAL_ERROR "expected ${low} < ${high}")
    endif()
endfunction()
error_of(f32 f32)
error_of(f16 f16)
error_of(kivi:bits=4 kivi)
error_of(mixkvq mixkvq)
expect_less(${f32} 1.00e-05)
expect_less(${f16} 1.00e-02)
expect_less(${f32} ${f16})
expect_less(${f16} ${kivi})
expect_less(${kivi} 2.00e-01)
expect_less(${mixkvq} 1.00e+00)

# A wrong spec is one sentence and a code, not an abort.
execute_process(COMMAND ${WORK_DIR}/build/consumer nonsense RESULT_VARIABLE code ERROR_VARIABLE err OUTPUT_QUIET)
if(NOT code EQUAL 1 OR NOT err MATCHES "^consumer: .*nonsense")
    message(FATAL_ERROR "wrong spec: exit code ${code}, message: ${err}")
endif()
# A version that this package is not.
file(WRITE ${WORK_DIR}/newer/CMakeLists.txt
    "cmake_minimum_required(VERSION 3.21)\nproject(newer LANGUAGES NONE)\nfind_package(kvmosaic 99 REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK_DIR}/newer -B ${WORK_DIR}/newer/build -DCMAKE_PREFIX_PATH=${prefix}
    RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE err)
if(code EQUAL 0 OR NOT err MATCHES "version: ${VERSION}")
    message(FATAL_ERROR "version 99 was not refused: ${err}")
endif()

# The example of docs/embedding.md in a project that knows no C++ at all.
file(READ ${PAGE} text)
string(REGEX MATCH "```c\n([^`]*)```" block "${text}")
string(REGEX REPLACE "^```c\n" "" block "${block}")
string(REGEX REPLACE "```$" "" block "${block}")
file(WRITE ${WORK_DIR}/c/main.c "${block}")
file(WRITE ${WORK_DIR}/c/CMakeLists.txt "cmake_minimum_required(VERSION 3.21)
project(plain LANGUAGES C)
set(CMAKE_C_STANDARD 99)
find_package(kvmosaic REQUIRED)
add_executable(plain main.c)
target_link_libraries(plain PRIVATE kvmosaic::c m)
")
step(${CMAKE_COMMAND} -G ${GENERATOR} -S ${WORK_DIR}/c -B ${WORK_DIR}/c/build -DCMAKE_C_COMPILER=${CC}
     -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_C_FLAGS=${flags} -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK_DIR}/c/build)
step(${WORK_DIR}/c/build/plain ${WORK_DIR}/c/example.kv)
if(NOT output MATCHES "300 tokens" OR NOT output MATCHES "loaded 300 rows")
    message(FATAL_ERROR "the C consumer said: ${output}")
endif()

# Saved sequences from C++, where kvmosaic::file is linked beside the cache.
file(WRITE ${WORK_DIR}/file/main.cc "#include <kvmosaic/file.h>
int main() {
    kvmosaic::ModelShape shape;
    shape.layers = {{.heads = 2, .kv_heads = 1, .key_dim = 32, .value_dim = 32}};
    auto cache = kvmosaic::Cache::create(shape, \"f16\");
    const auto none = kvmosaic::load_file(cache->get(), \"no such file\");
    return none.status().code() == kvmosaic::StatusCode::not_found ? 0 : 1;
}
")
file(WRITE ${WORK_DIR}/file/CMakeLists.txt "cmake_minimum_required(VERSION 3.21)
project(files LANGUAGES CXX)
find_package(kvmosaic REQUIRED)
add_executable(files main.cc)
target_link_libraries(files PRIVATE kvmosaic::file)
")
step(${CMAKE_COMMAND} -G ${GENERATOR} -S ${WORK_DIR}/file -B ${WORK_DIR}/file/build -DCMAKE_CXX_COMPILER=${CXX}
     -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_FLAGS=${flags} -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK_DIR}/file/build)
step(${WORK_DIR}/file/build/files)
