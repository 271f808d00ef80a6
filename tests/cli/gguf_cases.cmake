# GGUF files, broken and odd. The pre-flight check is tested by itself, and with libllama through the program.
include_guard(GLOBAL)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(gguf_sources ${PROJECT_SOURCE_DIR}/src/llama/gguf_check.cc ${PROJECT_SOURCE_DIR}/src/llama/gguf_file.cc
    ${PROJECT_SOURCE_DIR}/src/llama/gguf_model.cc)
add_executable(gguf_probe ${CMAKE_CURRENT_LIST_DIR}/gguf_probe.cc ${gguf_sources})
target_include_directories(gguf_probe PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(gguf_probe PRIVATE kvmosaic_flags)
set(gguf_environment "KVMOSAIC_GGUF_PROBE=$<TARGET_FILE:gguf_probe>" PYTHONDONTWRITEBYTECODE=1)
if(TARGET kvmosaic_program)
    add_executable(gguf_tokens ${CMAKE_CURRENT_LIST_DIR}/gguf_tokens.cc)
    target_link_libraries(gguf_tokens PRIVATE kvmosaic_eval kvmosaic_flags)
    list(APPEND gguf_environment "KVMOSAIC_PROGRAM=$<TARGET_FILE:kvmosaic_program>"
        "KVMOSAIC_GGUF_TOKENS=$<TARGET_FILE:gguf_tokens>")
endif()
if(KVMOSAIC_SANITIZE)
    list(APPEND gguf_environment KVMOSAIC_NO_LIMITS=1)
endif()
foreach(group Broken Sweeps Legal Large Split Tokenizers RealModels)
    string(TOLOWER ${group} name)
    add_test(NAME cli.gguf.${name}
        COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/gguf_cases.py -v ${group})
    set_tests_properties(cli.gguf.${name} PROPERTIES LABELS cli TIMEOUT 300 ENVIRONMENT "${gguf_environment}")
endforeach()
