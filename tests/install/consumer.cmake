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
