/* Every call of kvmosaic.h, from C: what it gives, and that wrong use is a code and a sentence. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmosaic.h"

enum { kHeads = 4, kKv = 2, kDim = 64, kRows = 300 };

static int failures = 0;
static kvmosaic_error error;

static void expect(int good, const char* what, int line) {
    if (good) return;
    ++failures;
    fprintf(stderr, "line %d: %s (%s)\n", line, what, error.message);
}
#define EXPECT(x) expect((x), #x, __LINE__)
#define EXPECT_REFUSED(call, want, word)                                                                               \
    do {                                                                                                               \
        EXPECT((call) == (want));                                                                                      \
        EXPECT(error.code == (want) && strstr(error.message, word) != NULL);                                           \
    } while (0)

static float q[kRows * kHeads * kDim], k[kRows * kKv * kDim], v[kRows * kKv * kDim];

static void make_rows(void) {
    uint32_t state = 1;
    float* all[3];
    size_t sizes[3];
    int i;
    all[0] = q, all[1] = k, all[2] = v;
    sizes[0] = sizeof(q) / sizeof(float), sizes[1] = sizeof(k) / sizeof(float), sizes[2] = sizeof(v) / sizeof(float);
    for (i = 0; i < 3; ++i) {
        size_t n;
        for (n = 0; n < sizes[i]; ++n) {
            state = state * 1664525u + 1013904223u;
            all[i][n] = (float)(state >> 8) / 8388608.0f - 1.0f;
        }
    }
}

static kvmosaic_cache* make_cache(const char* spec, const char* fingerprint, int32_t layers) {
    static kvmosaic_rope rope = KVMOSAIC_ROPE_INIT;
    kvmosaic_layer layer[2];
    kvmosaic_model model;
    kvmosaic_cache* cache = NULL;
    memset(layer, 0, sizeof(layer));
    memset(&model, 0, sizeof(model));
    rope.rotary = kDim;
    layer[0].heads = layer[1].heads = kHeads;
    layer[0].kv_heads = kKv, layer[1].kv_heads = 0;
    layer[0].key_dim = layer[0].value_dim = layer[1].key_dim = layer[1].value_dim = kDim;
    layer[0].rope = &rope;
    model.size = sizeof(model);
    model.layers = layer;
    model.layer_count = layers;
    model.fingerprint = fingerprint;
    EXPECT(kvmosaic_create(&model, spec, NULL, &cache, &error) == KVMOSAIC_OK);
    return cache;
}

/* Appends rows [from, from + n) to a sequence; out: [n][H][D] */
static int32_t append(kvmosaic_cache* cache, int32_t sequence, int from, int n, float* out) {
    kvmosaic_step_row rows[kRows];
    kvmosaic_rows rq, rk, rv;
    kvmosaic_attention args = KVMOSAIC_ATTENTION_INIT;
    int i;
    int32_t code;
    for (i = 0; i < n; ++i) {
        rows[i].position = from + i;
        rows[i].sequences = &sequence;
        rows[i].sequence_count = 1;
    }
    rq.base = q + from * kHeads * kDim, rq.row_stride = kHeads * kDim, rq.head_stride = kDim;
    rk.base = k + from * kKv * kDim, rk.row_stride = kKv * kDim, rk.head_stride = kDim;
    rv.base = v + from * kKv * kDim, rv.row_stride = kKv * kDim, rv.head_stride = kDim;
    args.scale = 0.125f;
    if ((code = kvmosaic_begin_step(cache, rows, n, &error)) != 0) return code;
    if ((code = kvmosaic_write(cache, 0, &rq, &rk, &rv, &error)) != 0) return code;
    if ((code = kvmosaic_attend(cache, 0, &rq, &args, out, &error)) != 0) return code;
    kvmosaic_end_step(cache);
    return 0;
}

static float out_a[kRows * kHeads * kDim], out_b[kRows * kHeads * kDim];

static void test_life(const char* spec) {
    kvmosaic_cache* cache = make_cache(spec, "model", 2);
    kvmosaic_cache* other = make_cache(spec, "model", 2);
    kvmosaic_footprint weight;
    kvmosaic_contents* contents = NULL;
    kvmosaic_saved what[2];
    int32_t tokens[250], names[4], into[2];
    uint8_t* bytes = NULL;
    size_t size = 0;
    int64_t count = 0;
    int i;
    float* rows = malloc(sizeof(float) * 250 * kDim);
    EXPECT(strncmp(kvmosaic_spec(cache), spec, 3) == 0 && kvmosaic_isa(cache)[0] && kvmosaic_path(cache)[0]);
    EXPECT(append(cache, 5, 0, 200, out_a) == 0);
    EXPECT(append(cache, 5, 200, 1, out_a) == 0);
    for (i = 0; i < kHeads * kDim; ++i)
        EXPECT(isfinite(out_a[i]) && fabsf(out_a[i]) < 1.0f); /* a mean of values in -1..1 */
    EXPECT(kvmosaic_fork(cache, 5, 6, &error) == 0);
    EXPECT(append(cache, 6, 201, 49, out_a) == 0);
    EXPECT(kvmosaic_row_count(cache, 5) == 201 && kvmosaic_row_count(cache, 6) == 250 &&
           kvmosaic_row_count(cache, 7) == 0);
    EXPECT(kvmosaic_sequences(cache, names, 1) == 2 && names[0] == 5);
    EXPECT(kvmosaic_positions(cache, 6, tokens, 250) == 250 && tokens[249] == 249);
    EXPECT(kvmosaic_decode(cache, 6, 0, 1, 1, 0, 250, rows, &error) == 0);
    for (i = 0; i < 250; ++i)
        EXPECT(fabsf(rows[i * kDim + 3] - v[(i * kKv + 1) * kDim + 3]) < 0.7f); /* at most a step of 2 bits */
    memset(&weight, 0, sizeof(weight));
    weight.size = sizeof(weight);
    EXPECT(kvmosaic_get_footprint(cache, &weight, &error) == 0);
    EXPECT(weight.tokens >= 250 && weight.tokens <= 451 && weight.cache_bytes > 0);
    EXPECT(fabs(weight.true_bits - 8.0 * (double)weight.cache_bytes / (double)(weight.values[0] + weight.values[1])) <
           1e-9);

    for (i = 0; i < 250; ++i)
        tokens[i] = 3 * i;
    memset(what, 0, sizeof(what));
    what[0].sequence = 6, what[0].tokens = tokens, what[0].token_count = 250, what[0].note = "six";
    what[1].sequence = 5;
    EXPECT(kvmosaic_save(cache, what, 2, 0, &bytes, &size, &error) == 0 && size > 0);
    EXPECT(kvmosaic_load(other, bytes, size, NULL, 0, &contents, &error) == 0);
    EXPECT(kvmosaic_contents_count(contents) == 2 && kvmosaic_contents_sequence(contents, 0) == 6);
    EXPECT(kvmosaic_contents_tokens(contents, 0, &count)[249] == 747 && count == 250);
    EXPECT(kvmosaic_contents_tokens(contents, 1, &count) == NULL && count == 0);
    EXPECT(strcmp(kvmosaic_contents_note(contents, 0), "six") == 0 && kvmosaic_contents_note(contents, 1)[0] == 0);
    EXPECT(kvmosaic_contents_sequence(contents, 2) == -1 && kvmosaic_contents_note(contents, -1)[0] == 0);
    kvmosaic_contents_free(contents);
    EXPECT(append(cache, 6, 250, 50, out_a) == 0 && append(other, 6, 250, 50, out_b) == 0);
    EXPECT(memcmp(out_a, out_b, sizeof(float) * 50 * kHeads * kDim) == 0);
    into[0] = 1, into[1] = 2;
    EXPECT(kvmosaic_load(other, bytes, size, into, 2, NULL, &error) == 0);
    EXPECT(kvmosaic_row_count(other, 1) == 250 && kvmosaic_row_count(other, 6) == 300);
    EXPECT_REFUSED(kvmosaic_load(other, bytes, size, into, 1, &contents, &error), KVMOSAIC_INVALID_ARGUMENT,
                   "2 sequences");
    EXPECT(contents == NULL);
    EXPECT_REFUSED(kvmosaic_load(other, bytes, size - 1, NULL, 0, NULL, &error), KVMOSAIC_CORRUPT, "length");
    bytes[size / 2] = (uint8_t)(bytes[size / 2] ^ 16u);
    EXPECT_REFUSED(kvmosaic_load(other, bytes, size, NULL, 0, NULL, &error), KVMOSAIC_CORRUPT, "checksum");
    EXPECT(kvmosaic_row_count(other, 6) == 300);
    kvmosaic_free(bytes);
    what[1].sequence = 9;
    EXPECT_REFUSED(kvmosaic_save(cache, what, 2, 0, &bytes, &size, &error), KVMOSAIC_INVALID_ARGUMENT, "only 250");
    EXPECT_REFUSED(kvmosaic_save(cache, what + 1, 1, 0, &bytes, &size, &error), KVMOSAIC_NOT_FOUND, "sequence 9");
    EXPECT(bytes == NULL && size == 0);

    EXPECT(kvmosaic_truncate(cache, 6, 210, &error) == 0 && kvmosaic_row_count(cache, 6) == 210);
    EXPECT_REFUSED(kvmosaic_truncate(cache, 6, 211, &error), KVMOSAIC_INVALID_ARGUMENT, "211");
    EXPECT_REFUSED(kvmosaic_fork(cache, 77, 1, &error), KVMOSAIC_NOT_FOUND, "77");
    kvmosaic_remove(cache, 5);
    EXPECT(kvmosaic_row_count(cache, 5) == 0);
    kvmosaic_clear(cache);
    EXPECT(kvmosaic_sequences(cache, NULL, 0) == 0);
    kvmosaic_destroy(cache);
    kvmosaic_destroy(other);
    free(rows);
}

static void test_operations(void) {
    kvmosaic_cache* cache = make_cache("kivi:bits=2", "model", 1);
    kvmosaic_cache* other = make_cache("kivi:bits=4", "model", 1);
    int32_t tokens[kRows], positions[kRows];
    int64_t rows = -1;
    int i;
    for (i = 0; i < kRows; ++i)
        tokens[i] = i % 7, positions[i] = i;
    EXPECT(append(cache, 0, 0, 200, out_a) == 0);
    EXPECT(kvmosaic_keep_prefix(cache, 0, tokens, 200, &error) == 0);
    EXPECT_REFUSED(kvmosaic_keep_prefix(cache, 0, tokens, 199, &error), KVMOSAIC_INVALID_ARGUMENT, "199");
    EXPECT_REFUSED(kvmosaic_keep_prefix(cache, 0, NULL, 5, &error), KVMOSAIC_INVALID_ARGUMENT, "tokens");
    EXPECT(kvmosaic_take_prefix(cache, 1, tokens, 250, &rows, &error) == 0 && rows == 200);
    EXPECT(kvmosaic_row_count(cache, 1) == 200);
    tokens[3] = 99;
    EXPECT(kvmosaic_take_prefix(cache, 2, tokens, 250, &rows, &error) == 0 && rows == 0);
    EXPECT(kvmosaic_row_count(cache, 2) == 0);
    EXPECT(kvmosaic_remove_rows(cache, 1, 20, 60, &error) == 0 && kvmosaic_row_count(cache, 1) == 160);
    EXPECT_REFUSED(kvmosaic_remove_rows(cache, 1, 150, 161, &error), KVMOSAIC_INVALID_ARGUMENT, "161");
    EXPECT(kvmosaic_reposition(cache, 1, 20, positions + 20, 140, &error) == 0);
    EXPECT(kvmosaic_positions(cache, 1, tokens, kRows) == 160 && tokens[159] == 159);
    EXPECT_REFUSED(kvmosaic_reposition(cache, 1, 20, NULL, 140, &error), KVMOSAIC_INVALID_ARGUMENT, "positions");
    EXPECT(kvmosaic_adopt(other, 4, cache, 0, &error) == 0 && kvmosaic_row_count(other, 4) == 200);
    EXPECT_REFUSED(kvmosaic_adopt(other, 4, cache, 9, &error), KVMOSAIC_NOT_FOUND, "9");
    EXPECT(kvmosaic_compact(cache) >= 0 && kvmosaic_compact(NULL) == 0);
    kvmosaic_clear(cache);
    EXPECT(kvmosaic_drop_prefixes(cache) == 1 && kvmosaic_drop_prefixes(cache) == 0);
    kvmosaic_destroy(cache);
    kvmosaic_destroy(other);
}

/* With a GPU sequences go there and back; without one the first call says so. */
static void test_device(const char* spec) {
    kvmosaic_cache* cache = make_cache(spec, "model", 1);
    kvmosaic_device* device = NULL;
    uint8_t *there = NULL, *back = NULL;
    size_t there_size = 0, back_size = 0;
    kvmosaic_saved what;
    int32_t rc;
    EXPECT_REFUSED(kvmosaic_device_create(NULL, 2, 500, 0, &device, &error), KVMOSAIC_INVALID_ARGUMENT, "like");
    EXPECT_REFUSED(kvmosaic_device_create(cache, 2, 500, 0, NULL, &error), KVMOSAIC_INVALID_ARGUMENT, "device");
    EXPECT_REFUSED(kvmosaic_to_device(NULL, 0, cache, 0, &error), KVMOSAIC_INVALID_ARGUMENT, "device");
    EXPECT_REFUSED(kvmosaic_from_device(NULL, 0, cache, 0, &error), KVMOSAIC_INVALID_ARGUMENT, "device");
    EXPECT(kvmosaic_device_bytes(NULL) == 0);
    kvmosaic_device_destroy(NULL);
    rc = kvmosaic_device_create(cache, 2, 500, 0, &device, &error);
    if (rc == KVMOSAIC_UNSUPPORTED) {
        EXPECT(device == NULL && strstr(error.message, "GPU") != NULL);
        printf("%s: no copies on a device: %s\n", spec, error.message);
        kvmosaic_destroy(cache);
        return;
    }
    EXPECT(rc == KVMOSAIC_OK && kvmosaic_device_bytes(device) > 0);
    EXPECT(append(cache, 0, 0, 280, out_a) == 0);
    memset(&what, 0, sizeof(what));
    EXPECT(kvmosaic_save(cache, &what, 1, 0, &there, &there_size, &error) == 0);
    EXPECT(kvmosaic_to_device(device, 1, cache, 0, &error) == 0);
    kvmosaic_clear(cache);
    EXPECT(kvmosaic_from_device(device, 1, cache, 0, &error) == 0 && kvmosaic_row_count(cache, 0) == 280);
    EXPECT(kvmosaic_save(cache, &what, 1, 0, &back, &back_size, &error) == 0);
    EXPECT(there_size == back_size && memcmp(there, back, there_size) == 0);
    EXPECT_REFUSED(kvmosaic_to_device(device, 2, cache, 0, &error), KVMOSAIC_INVALID_ARGUMENT, "2");
    EXPECT_REFUSED(kvmosaic_to_device(device, 1, cache, 7, &error), KVMOSAIC_NOT_FOUND, "7");
    EXPECT_REFUSED(kvmosaic_to_device(device, 1, NULL, 0, &error), KVMOSAIC_INVALID_ARGUMENT, "cache");
    kvmosaic_free(there), kvmosaic_free(back);
    kvmosaic_device_destroy(device);
    kvmosaic_destroy(cache);
}

static void test_files(const char* path) {
    kvmosaic_cache* cache = make_cache("kivi:bits=2", "model", 1);
    kvmosaic_cache* foreign = make_cache("kivi:bits=2", "another", 1);
    kvmosaic_saved what;
    memset(&what, 0, sizeof(what));
    EXPECT(append(cache, 0, 0, 150, out_a) == 0);
    EXPECT(kvmosaic_save_file(cache, &what, 1, 0, path, &error) == 0);
    EXPECT_REFUSED(kvmosaic_load_file(foreign, path, NULL, 0, NULL, &error), KVMOSAIC_CORRUPT, "fingerprint");
    kvmosaic_clear(cache);
    EXPECT(kvmosaic_load_file(cache, path, NULL, 0, NULL, &error) == 0 && kvmosaic_row_count(cache, 0) == 150);
    EXPECT_REFUSED(kvmosaic_load_file(cache, "no such file", NULL, 0, NULL, &error), KVMOSAIC_NOT_FOUND,
                   "no such file");
    remove(path);
    kvmosaic_destroy(cache);
    kvmosaic_destroy(foreign);
}

static void test_wrong_use(void) {
    kvmosaic_cache* cache = make_cache("f16", NULL, 2);
    kvmosaic_cache* none = cache;
    kvmosaic_model model;
    kvmosaic_layer layer;
    kvmosaic_rope rope = KVMOSAIC_ROPE_INIT;
    kvmosaic_options options = KVMOSAIC_OPTIONS_INIT;
    kvmosaic_attention args = KVMOSAIC_ATTENTION_INIT;
    kvmosaic_footprint weight;
    kvmosaic_step_row row;
    kvmosaic_rows rows;
    const int32_t sequence = 0;
    memset(&model, 0, sizeof(model));
    memset(&layer, 0, sizeof(layer));
    memset(&weight, 0, sizeof(weight));
    layer.heads = 3, layer.kv_heads = 2, layer.key_dim = layer.value_dim = 64;
    EXPECT_REFUSED(kvmosaic_create(NULL, "f16", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "model");
    EXPECT(none == NULL);
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "size");
    model.size = sizeof(model), model.layer_count = 1;
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "layers");
    model.layers = &layer;
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "head");
    layer.heads = 4;
    EXPECT_REFUSED(kvmosaic_create(&model, "nonsense", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "nonsense");
    EXPECT_REFUSED(kvmosaic_create(&model, NULL, NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "spec");
    rope.rotary = 65, layer.rope = &rope;
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", NULL, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "rotary");
    layer.rope = NULL, options.isa = "abacus";
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", &options, &none, &error), KVMOSAIC_UNSUPPORTED, "abacus");
    options.isa = NULL, options.max_rows = -1;
    EXPECT_REFUSED(kvmosaic_create(&model, "f16", &options, &none, &error), KVMOSAIC_INVALID_ARGUMENT, "max_rows");
    options.max_rows = 3;
    EXPECT(kvmosaic_create(&model, "f16", &options, &none, NULL) == KVMOSAIC_OK); /* nobody asks for the sentence */

    rows.base = q, rows.row_stride = kHeads * kDim, rows.head_stride = kDim;
    EXPECT_REFUSED(kvmosaic_write(cache, 0, &rows, &rows, &rows, &error), KVMOSAIC_INVALID_ARGUMENT, "open step");
    EXPECT_REFUSED(kvmosaic_begin_step(cache, NULL, 1, &error), KVMOSAIC_INVALID_ARGUMENT, "rows");
    row.position = 0, row.sequences = &sequence, row.sequence_count = 0;
    EXPECT_REFUSED(kvmosaic_begin_step(cache, &row, 1, &error), KVMOSAIC_INVALID_ARGUMENT, "row 0");
    row.sequence_count = 1;
    EXPECT(kvmosaic_begin_step(cache, &row, 1, &error) == KVMOSAIC_OK && error.message[0] == 0);
    EXPECT_REFUSED(kvmosaic_write(cache, 2, &rows, &rows, &rows, &error), KVMOSAIC_INVALID_ARGUMENT, "outside 0..1");
    EXPECT_REFUSED(kvmosaic_write(cache, 1, &rows, &rows, &rows, &error), KVMOSAIC_INVALID_ARGUMENT, "keeps no keys");
    EXPECT_REFUSED(kvmosaic_write(cache, 0, &rows, NULL, &rows, &error), KVMOSAIC_INVALID_ARGUMENT, "k:");
    EXPECT_REFUSED(kvmosaic_write_part(cache, 0, &rows, &rows, &rows, 2, 2, &error), KVMOSAIC_INVALID_ARGUMENT,
                   "thread 2");
    EXPECT_REFUSED(kvmosaic_attend(cache, 0, &rows, NULL, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "not written");
    EXPECT(kvmosaic_write(cache, 0, &rows, &rows, &rows, &error) == KVMOSAIC_OK);
    EXPECT_REFUSED(kvmosaic_write(cache, 0, &rows, &rows, &rows, &error), KVMOSAIC_INVALID_ARGUMENT, "was written");
    EXPECT_REFUSED(kvmosaic_attend(cache, 0, &rows, NULL, NULL, &error), KVMOSAIC_INVALID_ARGUMENT, "out");
    args.heads = 3;
    EXPECT_REFUSED(kvmosaic_attend(cache, 0, &rows, &args, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "heads: 3");
    args.heads = 0, args.size = 7;
    EXPECT_REFUSED(kvmosaic_attend(cache, 0, &rows, &args, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "size");
    args.size = sizeof(size_t); /* a caller that knows no field at all gets the defaults */
    EXPECT(kvmosaic_attend(cache, 0, &rows, &args, out_a, &error) == KVMOSAIC_OK);
    kvmosaic_end_step(cache);
    EXPECT_REFUSED(kvmosaic_attend(cache, 0, &rows, NULL, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "open step");
    EXPECT_REFUSED(kvmosaic_decode(cache, 0, 0, 0, 0, 0, 2, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "has 1");
    EXPECT_REFUSED(kvmosaic_decode(cache, 0, 0, 2, 0, 0, 1, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "KV head 2");
    EXPECT_REFUSED(kvmosaic_decode(cache, 0, 0, 0, 2, 0, 1, out_a, &error), KVMOSAIC_INVALID_ARGUMENT, "side");
    EXPECT_REFUSED(kvmosaic_get_footprint(cache, &weight, &error), KVMOSAIC_INVALID_ARGUMENT, "size");
    EXPECT(append(none, 0, 0, 3, out_a) == 0);
    EXPECT(append(none, 0, 3, 1, out_a) == KVMOSAIC_OUT_OF_CAPACITY && kvmosaic_row_count(none, 0) == 3);

    EXPECT_REFUSED(kvmosaic_fork(NULL, 0, 1, &error), KVMOSAIC_INVALID_ARGUMENT, "cache");
    EXPECT_REFUSED(kvmosaic_load_file(NULL, "x", NULL, 0, NULL, &error), KVMOSAIC_INVALID_ARGUMENT, "cache");
    EXPECT(kvmosaic_row_count(NULL, 0) == 0 && kvmosaic_spec(NULL)[0] == 0 && kvmosaic_contents_count(NULL) == 0);
    kvmosaic_end_step(NULL), kvmosaic_clear(NULL), kvmosaic_remove(NULL, 0), kvmosaic_free(NULL);
    kvmosaic_contents_free(NULL), kvmosaic_destroy(NULL);
    kvmosaic_destroy(cache);
    kvmosaic_destroy(none);
}

int main(void) {
    int32_t methods = 0;
    while (kvmosaic_method(methods))
        ++methods;
    make_rows();
    EXPECT(methods > 5 && kvmosaic_method(-1) == NULL);
    EXPECT(kvmosaic_abi() == KVMOSAIC_ABI && kvmosaic_version()[0] >= '0');
    test_life("f16");
    test_life("kivi:bits=2");
    test_life("mixkvq");
    test_operations();
    test_device("kivi:bits=2");
    test_device("mixkvq");
    test_files("capi_test.kv");
    test_wrong_use();
    if (failures == 0) printf("all calls did what they should\n");
    return failures == 0 ? 0 : 1;
}
