# Inserts the seam (src/llama/seam.h) into a llama.cpp source tree: 11 lines, each at an anchor that must occur
# exactly once; nothing of the original text is changed, moved or removed. A moved anchor stops the configure
# step and is named, so a llama.cpp version bump fails here and not at run time.
#
#   cmake -DLLAMA_DIR=<llama.cpp source> -P apply_seam.cmake                   apply (idempotent)
#   cmake -DLLAMA_DIR=<llama.cpp source> -DCHECK_ONLY=ON -P apply_seam.cmake   verify the anchors only
cmake_minimum_required(VERSION 3.21)

if(NOT DEFINED LLAMA_DIR OR NOT EXISTS "${LLAMA_DIR}/src/llama-graph.cpp")
    message(FATAL_ERROR "seam: LLAMA_DIR must name a llama.cpp source tree")
endif()

set(MARK "// kvmosaic")

function(seam_count out text needle)
    string(LENGTH "${needle}" step)
    set(n 0)
    set(rest "${text}")
    while(TRUE)
        string(FIND "${rest}" "${needle}" at)
        if(at EQUAL -1)
            break()
        endif()
        math(EXPR n "${n} + 1")
        math(EXPR at "${at} + ${step}")
        string(SUBSTRING "${rest}" ${at} -1 rest)
    endwhile()
    set(${out} ${n} PARENT_SCOPE)
endfunction()

# seam_insert(<variable holding the file text> <file name> <anchor> <tail> <line>)
# Finds the one place where <anchor> occurs, then (if <tail> is not empty) the first <tail> after it,
# and puts <line> on a line of its own right behind.
function(seam_insert var name anchor tail line)
    set(text "${${var}}")
    seam_count(n "${text}" "${anchor}")
    if(NOT n EQUAL 1)
        message(FATAL_ERROR "seam: ${name}: anchor occurs ${n} times, expected once:\n${anchor}")
    endif()
    string(FIND "${text}" "${anchor}" at)
    string(LENGTH "${anchor}" len)
    math(EXPR at "${at} + ${len}")
    if(NOT tail STREQUAL "")
        string(SUBSTRING "${text}" ${at} 1200 near)
        string(FIND "${near}" "${tail}" off)
        if(off EQUAL -1)
            message(FATAL_ERROR "seam: ${name}: no function body close behind the anchor:\n${anchor}")
        endif()
        string(LENGTH "${tail}" len)
        math(EXPR at "${at} + ${off} + ${len}")
    endif()
    string(SUBSTRING "${text}" 0 ${at} head)
    string(SUBSTRING "${text}" ${at} -1 rest)
    set(${var} "${head}${line} ${MARK}\n${rest}" PARENT_SCOPE)
endfunction()

function(seam_load var file)
    file(READ "${file}" text)
    # CMake lists give a trailing backslash and brackets no meaning inside a quoted string, but a
    # file with carriage returns would not match the anchors: say so instead of failing obscurely.
    string(FIND "${text}" "\r\n" crlf)
    if(NOT crlf EQUAL -1)
        message(FATAL_ERROR "seam: ${file} has CRLF line ends; use the source package as published")
    endif()
    set(${var} "${text}" PARENT_SCOPE)
endfunction()

set(MODEL "${LLAMA_DIR}/src/llama-model.cpp")
set(GRAPH "${LLAMA_DIR}/src/llama-graph.cpp")

seam_load(model "${MODEL}")
seam_load(graph "${GRAPH}")

string(FIND "${model}" "${MARK}" done_model)
string(FIND "${graph}" "${MARK}" done_graph)
if(NOT done_model EQUAL -1 AND NOT done_graph EQUAL -1)
    message(STATUS "seam: already applied")
    return()
endif()
if(NOT done_model EQUAL -1 OR NOT done_graph EQUAL -1)
    message(FATAL_ERROR "seam: the tree is half patched; start from a fresh copy")
endif()

set(BODY "const {\n")

# --- where the memory is chosen ------------------------------------------------------------------
seam_insert(model "llama-model.cpp" "#include \"llama-model.h\"\n" "" "#include \"kvmosaic_seam.h\"")
seam_insert(model "llama-model.cpp" "GGML_ASSERT(!hparams.is_swa_any());\n" ""
    "                        if ((res = kvmosaic::seam::memory(*this, params, cparams, nullptr))) { break; }")
seam_insert(model "llama-model.cpp" "GGML_ASSERT(hparams.is_swa_any());\n" ""
    "                        if ((res = kvmosaic::seam::memory(*this, params, cparams, reuse))) { break; }")

# --- where the graph meets the memory ------------------------------------------------------------
seam_insert(graph "llama-graph.cpp" "#include \"llama-graph.h\"\n" "" "#include \"kvmosaic_seam.h\"")
seam_insert(graph "llama-graph.cpp" "llm_graph_context::build_attn_inp_kv() ${BODY}" ""
    "    if (auto * own = kvmosaic::seam::input_kv(*this)) { return own; }")
seam_insert(graph "llama-graph.cpp" "llm_graph_context::build_attn_inp_kv_iswa() ${BODY}" ""
    "    if (auto * own = kvmosaic::seam::input_kv_iswa(*this)) { return own; }")
foreach(kind kv kv_iswa)
    seam_insert(graph "llama-graph.cpp"
        "llm_graph_context::build_attn(\n        llm_graph_input_attn_${kind} * inp,\n" "${BODY}"
        "    if (auto * own = kvmosaic::seam::attend(*this, inp, wo, wo_b, wo_s, q_cur, k_cur, v_cur, kq_b, sinks, v_mla, kq_scale, il)) { return own; }")
endforeach()
foreach(what build_inp_pos_bucket_dec build_attn_inp_k build_attn_inp_k_iswa)
    seam_insert(graph "llama-graph.cpp" "llm_graph_context::${what}() ${BODY}" ""
        "    kvmosaic::seam::refuse(*this, __func__);")
endforeach()

if(CHECK_ONLY)
    message(STATUS "seam: all anchors found, nothing written")
    return()
endif()

file(COPY_FILE "${CMAKE_CURRENT_LIST_DIR}/../src/llama/seam.h" "${LLAMA_DIR}/src/kvmosaic_seam.h")
file(WRITE "${MODEL}" "${model}")
file(WRITE "${GRAPH}" "${graph}")
message(STATUS "seam: applied")
