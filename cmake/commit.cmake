# Writes OUTPUT, a C++ source that names the commit of SOURCE, when what it says has changed: run in every build, but
# only that one file is compiled again. "unknown" where SOURCE is not the root of a git checkout (a tarball).
set(commit unknown)
find_program(git_program git)
if(git_program)
    execute_process(COMMAND ${git_program} -C ${SOURCE} rev-parse --show-cdup
        OUTPUT_VARIABLE up ERROR_QUIET RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed AND up STREQUAL "")
        execute_process(COMMAND ${git_program} -C ${SOURCE} describe --always --dirty --abbrev=12
            OUTPUT_VARIABLE described ERROR_QUIET RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(NOT failed AND described MATCHES "^[A-Za-z0-9._/-]+$")
            set(commit ${described})
        endif()
    endif()
endif()
set(text "#include \"eval/build.h\"\n\nnamespace kvmosaic::eval {\n\nconst char* build_commit() { return \"${commit}\"; }\n\n} // namespace kvmosaic::eval\n")
set(old "")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
    file(WRITE ${OUTPUT} "${text}")
endif()
