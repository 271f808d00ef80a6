/* kvmosaic for C and for everything that can call C: a key/value cache at 2 to 4 true bits a value.
 *
 * Every call that can fail returns a code, KVMOSAIC_OK = 0, and writes one sentence into `error`, which may be null.
 * After an error nothing has changed, unless its comment says otherwise. Nothing throws, prints or aborts. Strings are
 * UTF-8 and end with 0. A cache may be used by one thread at a time, but for the two calls that are named *_part.
 * L layers, H query heads, G KV heads, D head size. An example is in docs/embedding.md.
 */
#ifndef KVMOSAIC_C_H
#define KVMOSAIC_C_H

#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVMOSAIC_API __attribute__((visibility("default")))
#else
#define KVMOSAIC_API
#endif

/* ---- versions ---- */

#define KVMOSAIC_ABI 1
/* What the library was built with. It serves programs whose KVMOSAIC_ABI is the same; later versions only add calls,
 * and fields at the end of the structures that begin with `size`. */
KVMOSAIC_API int32_t kvmosaic_abi(void);
KVMOSAIC_API const char* kvmosaic_version(void); /* "0.1.0" */

/* ---- errors ---- */

enum {
    KVMOSAIC_OK = 0,
    KVMOSAIC_INVALID_ARGUMENT = 1, /* outside its range, or a call out of order */
    KVMOSAIC_NOT_FOUND = 2,        /* a name, sequence or file that does not exist */
    KVMOSAIC_OUT_OF_CAPACITY = 3,  /* max_rows or max_bytes would be exceeded */
    KVMOSAIC_OUT_OF_MEMORY = 4,
    KVMOSAIC_UNSUPPORTED = 5, /* legal, but this build or model cannot do it */
    KVMOSAIC_CORRUPT = 6,     /* saved bytes that are damaged, or belong to another model, method or version */
    KVMOSAIC_INTERNAL = 7     /* a defect of the library */
};
typedef struct kvmosaic_error {
    int32_t code;
    char message[508]; /* what, where and the allowed range; cut if longer; "" when all went well */
} kvmosaic_error;

/* ---- models ---- */

/* Rotation of a layer's keys. Only methods that pack keys from before it, or look at its pairs, need it. */
typedef struct kvmosaic_rope {
    int32_t halves;                                      /* 1: pairs are (i, i + rotary/2); 0: (2i, 2i + 1) */
    int32_t rotary;                                      /* channels that turn, even, at most D */
    float base, freq_scale;                              /* 10000 in many models, 1 */
    float ext_factor, attn_factor, beta_fast, beta_slow; /* YaRN: 0, 1, 32, 1 without it */
    int32_t original_context;
    const float* factors; /* [rotary/2] divisors of the frequencies, or null */
} kvmosaic_rope;
#define KVMOSAIC_ROPE_INIT                                                                                             \
    { 1, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f, 0, 0 }

typedef struct kvmosaic_layer {
    int32_t heads;              /* H */
    int32_t kv_heads;           /* G, which divides H; 0: the layer keeps nothing (it reads another's) */
    int32_t key_dim, value_dim; /* D of either side, 1 to 512 */
    const kvmosaic_rope* rope;  /* null: not known */
} kvmosaic_layer;

typedef struct kvmosaic_model {
    size_t size;                  /* sizeof(kvmosaic_model) */
    const kvmosaic_layer* layers; /* [layer_count] */
    int32_t layer_count;
    const char* name;        /* for messages, or null */
    const char* fingerprint; /* names the weights; saved sequences are bound to it. Null: nobody can tell */
} kvmosaic_model;

/* ---- caches ---- */

typedef struct kvmosaic_options {
    size_t size;       /* sizeof(kvmosaic_options) */
    int64_t max_rows;  /* per sequence; 0: no limit */
    int64_t max_bytes; /* of pages; 0: no limit */
    int32_t chunk;     /* 0: rows of a step see what they would see one at a time; 1: they see each other unpacked */
    int32_t fast;      /* 0: weights of 15 bits, error below 5e-4; 1: of 7 bits, up to 5e-2 */
    int32_t restore;   /* 1: decode pages before attending, also where codes could be read */
    const char* isa;   /* "avx2", "scalar", ...; null: the best of this machine */
    int32_t rollback;  /* kvmosaic_truncate is exact down to this many rows before the newest; 0 to 65536 */
} kvmosaic_options;
#define KVMOSAIC_OPTIONS_INIT                                                                                          \
    { sizeof(kvmosaic_options), 0, 0, 0, 0, 0, 0, 0 }

typedef struct kvmosaic_cache kvmosaic_cache;

/* spec: "kivi:bits=2" and the like (kvmosaic methods). options: null for defaults. On an error *cache is null. */
KVMOSAIC_API int32_t kvmosaic_create(const kvmosaic_model* model, const char* spec, const kvmosaic_options* options,
                                     kvmosaic_cache** cache, kvmosaic_error* error);
KVMOSAIC_API void kvmosaic_destroy(kvmosaic_cache* cache); /* null is fine */
/* In full, valid as long as the cache. Path: "fused", "restore", "partly fused" or "raw". */
KVMOSAIC_API const char* kvmosaic_spec(const kvmosaic_cache* cache);
KVMOSAIC_API const char* kvmosaic_path(const kvmosaic_cache* cache);
KVMOSAIC_API const char* kvmosaic_isa(const kvmosaic_cache* cache);
/* Names of all methods, index from 0; null behind the last. */
KVMOSAIC_API const char* kvmosaic_method(int32_t index);

/* ---- a step: begin; for each layer write, then attend; end ---- */

typedef struct kvmosaic_step_row {
    int32_t position;         /* of the rotation; from 0, never below the sequence's last */
    const int32_t* sequences; /* [sequence_count] that the row belongs to, at least one */
    int32_t sequence_count;
} kvmosaic_step_row;

/* Floats as they lie: element d of head h of row t is base[t * row_stride + h * head_stride + d]. */
typedef struct kvmosaic_rows {
    const float* base;
    int64_t row_stride, head_stride; /* in elements */
} kvmosaic_rows;

typedef struct kvmosaic_attention {
    size_t size;        /* sizeof(kvmosaic_attention) */
    float scale;        /* of q . k, usually 1 / sqrt(D) */
    float soft_cap;     /* c tanh(x / c) on scaled scores; 0: none */
    const float* sinks; /* [H] extra logit in the denominator, or null */
    int32_t window;     /* a row sees at most so many positions, its own included; 0: all */
    int32_t causal;     /* 1 */
    int32_t heads;      /* H of a layer that reads another's keys and values; 0: the layer's own */
} kvmosaic_attention;
#define KVMOSAIC_ATTENTION_INIT                                                                                        \
    { sizeof(kvmosaic_attention), 1.0f, 0.0f, 0, 0, 1, 0 }

/* Places the rows and takes all memory that the step can need. Ends a step that is open. */
KVMOSAIC_API int32_t kvmosaic_begin_step(kvmosaic_cache* cache, const kvmosaic_step_row* rows, int32_t count,
                                         kvmosaic_error* error);
/* Once a layer and step. q: [rows, H, D keys], k: [rows, G, D keys], v: [rows, G, D values], all after the rotation. */
KVMOSAIC_API int32_t kvmosaic_write(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q,
                                    const kvmosaic_rows* k, const kvmosaic_rows* v, kvmosaic_error* error);
/* After the layer's write. out: [rows, H, D values], dense. args: null for defaults. */
KVMOSAIC_API int32_t kvmosaic_attend(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q,
                                     const kvmosaic_attention* args, float* out, kvmosaic_error* error);
/* The same by `threads` threads, each with its own `thread` from 0; all of them must make the call, and all writes of a
 * layer end before its first attend begins. */
KVMOSAIC_API int32_t kvmosaic_write_part(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q,
                                         const kvmosaic_rows* k, const kvmosaic_rows* v, int32_t thread,
                                         int32_t threads, kvmosaic_error* error);
KVMOSAIC_API int32_t kvmosaic_attend_part(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q,
                                          const kvmosaic_attention* args, float* out, int32_t thread, int32_t threads,
                                          kvmosaic_error* error);
KVMOSAIC_API void kvmosaic_end_step(kvmosaic_cache* cache); /* safe to call twice */

/* ---- sequences; each call ends an open step ---- */

KVMOSAIC_API int64_t kvmosaic_row_count(const kvmosaic_cache* cache, int32_t sequence); /* 0 for an unknown one */
/* Copies up to `room` positions; returns how many there are. */
KVMOSAIC_API int64_t kvmosaic_positions(const kvmosaic_cache* cache, int32_t sequence, int32_t* positions,
                                        int64_t room);
/* Names, ascending, likewise. */
KVMOSAIC_API int64_t kvmosaic_sequences(const kvmosaic_cache* cache, int32_t* sequences, int64_t room);
/* `to` becomes equal to `from` and shares its pages. */
KVMOSAIC_API int32_t kvmosaic_fork(kvmosaic_cache* cache, int32_t from, int32_t to, kvmosaic_error* error);
/* Keeps the first `rows` rows: exact within the rollback window; below it a cut page is decoded and packed again. */
KVMOSAIC_API int32_t kvmosaic_truncate(kvmosaic_cache* cache, int32_t sequence, int64_t rows, kvmosaic_error* error);
/* Drops rows [first, last); positions of later rows stay. Later rows are decoded and packed again. */
KVMOSAIC_API int32_t kvmosaic_remove_rows(kvmosaic_cache* cache, int32_t sequence, int64_t first, int64_t last,
                                          kvmosaic_error* error);
/* Gives rows first .. last row new positions, [count], and turns their keys there. Needs the rotation of all layers. */
KVMOSAIC_API int32_t kvmosaic_reposition(kvmosaic_cache* cache, int32_t sequence, int64_t first,
                                         const int32_t* positions, int64_t count, kvmosaic_error* error);
/* `to` becomes sequence `sequence` of another cache of the same model, packed by this cache's method. */
KVMOSAIC_API int32_t kvmosaic_adopt(kvmosaic_cache* cache, int32_t to, kvmosaic_cache* from, int32_t sequence,
                                    kvmosaic_error* error);
/* Gives back memory that no sequence needs; changes no row. Returns bytes. */
KVMOSAIC_API int64_t kvmosaic_compact(kvmosaic_cache* cache);
/* Keeps the sequence as it is for others that begin with the same tokens: [count], one for each of its rows. */
KVMOSAIC_API int32_t kvmosaic_keep_prefix(kvmosaic_cache* cache, int32_t sequence, const int32_t* tokens, int64_t count,
                                          kvmosaic_error* error);
/* The sequence becomes the longest kept one with which the tokens begin. *rows: how many need not be read; 0: none is
 * kept, and nothing has changed. */
KVMOSAIC_API int32_t kvmosaic_take_prefix(kvmosaic_cache* cache, int32_t sequence, const int32_t* tokens, int64_t count,
                                          int64_t* rows, kvmosaic_error* error);
KVMOSAIC_API int64_t kvmosaic_drop_prefixes(kvmosaic_cache* cache); /* those that nobody uses; returns how many */
KVMOSAIC_API void kvmosaic_remove(kvmosaic_cache* cache, int32_t sequence);
KVMOSAIC_API void kvmosaic_clear(kvmosaic_cache* cache);
/* Rows [first, first + count) of a side (0 keys, 1 values) as attention sees them. out: [count, D] */
KVMOSAIC_API int32_t kvmosaic_decode(kvmosaic_cache* cache, int32_t sequence, int32_t layer, int32_t kv_head,
                                     int32_t side, int64_t first, int64_t count, float* out, kvmosaic_error* error);

/* ---- saving: checked, versioned, a file is replaced whole or not at all ---- */

typedef struct kvmosaic_saved {
    int32_t sequence;
    const int32_t* tokens; /* [token_count] ids of its rows, and of what follows them; or null */
    int64_t token_count;
    const char* note; /* anything the program wants to find again, or null */
} kvmosaic_saved;

/* compress: 1 for zstd, refused where the build has none. Bytes are given back with kvmosaic_free. */
KVMOSAIC_API int32_t kvmosaic_save(kvmosaic_cache* cache, const kvmosaic_saved* what, int32_t count, int32_t compress,
                                   uint8_t** bytes, size_t* size, kvmosaic_error* error);
KVMOSAIC_API int32_t kvmosaic_save_file(kvmosaic_cache* cache, const kvmosaic_saved* what, int32_t count,
                                        int32_t compress, const char* path, kvmosaic_error* error);
KVMOSAIC_API void kvmosaic_free(uint8_t* bytes); /* null is fine */

typedef struct kvmosaic_contents kvmosaic_contents; /* what was found beside the rows */
/* All sequences of the bytes replace those of the same name. into: other names, [count] in the order of the bytes, or
 * null and 0. contents: null if unwanted; given back with kvmosaic_contents_free. */
KVMOSAIC_API int32_t kvmosaic_load(kvmosaic_cache* cache, const uint8_t* bytes, size_t size, const int32_t* into,
                                   int32_t count, kvmosaic_contents** contents, kvmosaic_error* error);
KVMOSAIC_API int32_t kvmosaic_load_file(kvmosaic_cache* cache, const char* path, const int32_t* into, int32_t count,
                                        kvmosaic_contents** contents, kvmosaic_error* error);
KVMOSAIC_API int32_t kvmosaic_contents_count(const kvmosaic_contents* contents);
KVMOSAIC_API int32_t kvmosaic_contents_sequence(const kvmosaic_contents* contents, int32_t index);
/* Valid as long as the contents; null and 0, or "", where there was nothing. */
KVMOSAIC_API const int32_t* kvmosaic_contents_tokens(const kvmosaic_contents* contents, int32_t index, int64_t* count);
KVMOSAIC_API const char* kvmosaic_contents_note(const kvmosaic_contents* contents, int32_t index);
KVMOSAIC_API void kvmosaic_contents_free(kvmosaic_contents* contents); /* null is fine */

/* ---- what it weighs, in bytes ---- */

typedef struct kvmosaic_footprint {
    size_t size;       /* sizeof(kvmosaic_footprint), set by the caller */
    int64_t tokens;    /* rows over all sequences, shared rows once */
    int64_t values[2]; /* keys, values: tokens x G x D over all layers */
    int64_t packed[2]; /* pages: codes, scales, offsets, maps, padding */
    int64_t raw[2];    /* rows that are not packed */
    int64_t tables, statistics, reserved;
    int64_t scratch;     /* working memory, not part of the cache */
    int64_t cache_bytes; /* packed + raw + tables + statistics + reserved */
    double true_bits;    /* bits a value: 8 cache_bytes / values */
} kvmosaic_footprint;
KVMOSAIC_API int32_t kvmosaic_get_footprint(kvmosaic_cache* cache, kvmosaic_footprint* footprint,
                                            kvmosaic_error* error);

/* ---- copies on the current GPU: transcoded, equal to the byte; kvmosaic/device.h attends and appends there ---- */

typedef struct kvmosaic_device kvmosaic_device;
/* Room for `slots` sequences of at most `max_rows` rows, of the model and method of `like`. bits: mean width where the
 * data decides it, 0 for the most there is. UNSUPPORTED without a GPU or its backend. */
KVMOSAIC_API int32_t kvmosaic_device_create(const kvmosaic_cache* like, int32_t slots, int64_t max_rows, double bits,
                                            kvmosaic_device** device, kvmosaic_error* error);
KVMOSAIC_API void kvmosaic_device_destroy(kvmosaic_device* device); /* null is fine */
/* The slot becomes a copy of the sequence; the sequence becomes a copy of the slot. */
KVMOSAIC_API int32_t kvmosaic_to_device(kvmosaic_device* device, int32_t slot, kvmosaic_cache* cache, int32_t sequence,
                                        kvmosaic_error* error);
KVMOSAIC_API int32_t kvmosaic_from_device(const kvmosaic_device* device, int32_t slot, kvmosaic_cache* cache,
                                          int32_t sequence, kvmosaic_error* error);
KVMOSAIC_API int64_t kvmosaic_device_bytes(const kvmosaic_device* device); /* allocated there */
#ifdef __cplusplus
}
#endif
#endif
