/* The inner loops of the data path: checking an index, shuffling, locating samples, walking a
 * blend, reading a sample.
 *
 * Every function has a numpy counterpart with the same result (see native.py); this file only
 * changes the time. Arrays come through the buffer protocol. 64-bit fields of an index file need
 * not be aligned, so they are read by memcpy, which compiles to a plain load.
 *
 * Build without contraction of a*b-c into one rounding (-ffp-contract=off): the order of a blend
 * is defined in separately rounded double precision.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_BUFFERS 7

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

typedef struct {
    Py_buffer views[MOST_BUFFERS];
    int held;
} Buffers;

static void release(Buffers *buffers) {
    while (buffers->held > 0) PyBuffer_Release(&buffers->views[--buffers->held]);
}

/* Return the memory of an array, or NULL with an exception if it is too small or read-only. */
static void *memory(Buffers *buffers, PyObject *array, Py_ssize_t bytes, int writable) {
    Py_buffer *view = &buffers->views[buffers->held];
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return NULL;
    buffers->held++;
    if (view->len < bytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes where %zd are needed", view->len,
                     bytes);
        return NULL;
    }
    return view->buf;
}

static int64_t load64(const void *array, int64_t at) {
    int64_t value;
    memcpy(&value, (const char *)array + 8 * at, 8);
    return value;
}

static int32_t load32(const void *array, int64_t at) {
    int32_t value;
    memcpy(&value, (const char *)array + 4 * at, 4);
    return value;
}

/* sample_index(lengths, documents, sequence_length, extra, wide, out, num_samples): fill rows
 * 1..num_samples of out [num_samples + 1, 2], int64 if wide else int32. */
static PyObject *sample_index(PyObject *self, PyObject *args) {
    PyObject *lengths_array, *documents_array, *out_array;
    long long sequence_length, extra, num_samples;
    int wide;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOLLpOL", &lengths_array, &documents_array, &sequence_length,
                          &extra, &wide, &out_array, &num_samples))
        return NULL;
    Buffers buffers = {.held = 0};
    const char *lengths = memory(&buffers, lengths_array, 0, 0);
    const char *documents = lengths ? memory(&buffers, documents_array, 4, 0) : NULL;
    int64_t row_bytes = wide ? 16 : 8;
    char *out = documents ? memory(&buffers, out_array, row_bytes, 1) : NULL;
    if (!out) {
        release(&buffers);
        return NULL;
    }
    /* Products of these stay far below 2^63. */
    if (num_samples < 0 || num_samples > buffers.views[2].len / row_bytes - 1 ||
        sequence_length < 0 || extra < 0 || extra > 1 ||
        (num_samples > 0 && sequence_length > (INT64_MAX >> 1) / num_samples)) {
        release(&buffers);
        PyErr_SetString(PyExc_ValueError, "more samples than fit, or an impossible length");
        return NULL;
    }
    int64_t num_lengths = buffers.views[0].len / 4, num_documents = buffers.views[1].len / 4;
    int64_t position = -1, end = 0, length = 0, row = 1, bad = -1;
    Py_BEGIN_ALLOW_THREADS;
    for (; row <= num_samples; row++) {
        int64_t begin = row * sequence_length;
        int64_t last_taken = begin + extra - 1; /* its document is where the sample ends */
        while (end <= last_taken && position < num_documents - 1) {
            int32_t document = load32(documents, ++position);
            if (document < 0 || document >= num_lengths) {
                bad = position;
                break;
            }
            length = load32(lengths, document);
            if (length < 0) {
                bad = position;
                break;
            }
            end += length; /* fewer than 2^32 entries of less than 2^31 */
        }
        if (bad >= 0) break;
        /* Once the stream has run out, the walk stays at the end of the last document. */
        int64_t offset = end <= last_taken ? length - extra : begin - (end - length);
        if (wide) {
            memcpy(out + 16 * row, &position, 8);
            memcpy(out + 16 * row + 8, &offset, 8);
        } else {
            int32_t pair[2] = {(int32_t)position, (int32_t)offset};
            memcpy(out + 8 * row, pair, 8);
        }
    }
    Py_END_ALLOW_THREADS;
    release(&buffers);
    if (bad >= 0) {
        PyErr_Format(PyExc_IndexError, "no document of the number at position %lld",
                     (long long)bad);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* walk_blend(weights, capacities or None, start, steps, counts, picks): write the datasets of samples
 * start .. start + steps - 1 to picks, int16; counts [D] float64 are updated. */
static PyObject *walk_blend(PyObject *self, PyObject *args) {
    PyObject *weights_array, *capacities_array, *counts_array, *picks_array;
    long long start, steps;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOLLOO", &weights_array, &capacities_array, &start, &steps,
                          &counts_array, &picks_array))
        return NULL;
    Buffers buffers = {.held = 0};
    const double *weights = memory(&buffers, weights_array, 8, 0);
    int64_t num_datasets = weights ? buffers.views[0].len / 8 : 0;
    double *counts = weights ? memory(&buffers, counts_array, 8 * num_datasets, 1) : NULL;
    const double *capacities = NULL;
    int16_t *picks = NULL;
    if (counts && capacities_array != Py_None)
        capacities = memory(&buffers, capacities_array, 8 * num_datasets, 0);
    if (!PyErr_Occurred()) picks = memory(&buffers, picks_array, 0, 1);
    if (picks && (start < 0 || steps < 0 || steps > buffers.views[buffers.held - 1].len / 2 ||
                  start > INT64_MAX - steps || num_datasets > INT16_MAX))
        PyErr_SetString(PyExc_ValueError, "more samples than fit, or too many datasets");
    if (PyErr_Occurred()) {
        release(&buffers);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t step = 0; step < steps; step++) {
        double sample = (double)(start + step > 1 ? start + step : 1);
        int64_t best = 0;
        double most = -Py_HUGE_VAL;
        for (int64_t dataset = 0; dataset < num_datasets; dataset++) {
            double deficit = weights[dataset] * sample - counts[dataset];
            if (deficit > most && !(capacities && counts[dataset] >= capacities[dataset])) {
                most = deficit;
                best = dataset;
            }
        }
        counts[best] += 1;
        picks[step] = (int16_t)best;
    }
    Py_END_ALLOW_THREADS;
    release(&buffers);
    Py_RETURN_NONE;
}

typedef struct {
    int64_t lowest, highest, num_pads;
} Seen;

/* Extremes are kept in `wide`: 32 bits where they suffice, which compilers vectorise everywhere. */
#define COPY(type, wide)                                                  \
    {                                                                     \
        wide lowest = 0, highest = 0, sought = (wide)pad;                 \
        int64_t num_pads = 0;                                             \
        int is_possible = (int64_t)sought == pad;                         \
        for (int64_t begin = 0; begin < count; begin += BLOCK) {          \
            int64_t end = begin + BLOCK < count ? begin + BLOCK : count;  \
            int32_t found = 0;                                            \
            for (int64_t i = begin; i < end; i++) {                       \
                type token;                                               \
                memcpy(&token, source + i * (int64_t)sizeof(type), sizeof(type)); \
                wide value = (wide)token;                                 \
                target[i] = (int64_t)value;                               \
                lowest = value < lowest ? value : lowest;                 \
                highest = value > highest ? value : highest;              \
                found += value == sought;                                 \
            }                                                             \
            num_pads += found;                                            \
        }                                                                 \
        seen->lowest = lowest < seen->lowest ? lowest : seen->lowest;     \
        seen->highest = highest > seen->highest ? highest : seen->highest; \
        seen->num_pads += is_possible ? num_pads : 0;                     \
    }

#define BLOCK 65536

static void copy_tokens(int code, const char *source, int64_t count, int64_t pad, int64_t *target,
                        Seen *seen) {
    switch (code) {
        case 1: COPY(uint8_t, int32_t) break;
        case 2: COPY(int8_t, int32_t) break;
        case 3: COPY(int16_t, int32_t) break;
        case 4: COPY(int32_t, int32_t) break;
        case 5: COPY(int64_t, int64_t) break;
        case 8: COPY(uint16_t, int32_t) break;
    }
}

static const int SIZE_OF_CODE[] = {0, 1, 1, 2, 4, 8, 0, 0, 2};

/* Read entry `at` of an array of 8-byte integers if wide, else of 4-byte ones. */
static int64_t load(const void *array, int64_t at, int wide, int is_signed) {
    if (wide) return load64(array, at);
    int32_t value = load32(array, at);
    return is_signed ? value : (int64_t)(uint32_t)value;
}

/* gather(tokens, code, pointers, lengths, documents, samples, samples_are_wide, shuffle,
 *        shuffle_is_wide, idx, extra, pad, out):
 * copy the tokens of sample shuffle[idx] into out, int64. Return (tokens copied, lowest or 0,
 * highest or 0, how many equal pad). */
static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (nargs != 13) {
        PyErr_Format(PyExc_TypeError, "gather takes 13 arguments, not %zd", nargs);
        return NULL;
    }
    int64_t numbers[6];
    static const int places[6] = {1, 6, 8, 9, 10, 11};
    for (int i = 0; i < 6; i++) {
        numbers[i] = PyLong_AsLongLong(args[places[i]]);
        if (numbers[i] == -1 && PyErr_Occurred()) return NULL;
    }
    int code = (int)numbers[0], samples_wide = numbers[1] != 0, shuffle_wide = numbers[2] != 0;
    int64_t idx = numbers[3], extra = numbers[4], pad = numbers[5];
    if (numbers[0] < 1 || numbers[0] > 8 || !SIZE_OF_CODE[code]) {
        PyErr_Format(PyExc_ValueError, "tokens of dtype code %d are not integers", code);
        return NULL;
    }
    Buffers buffers = {.held = 0};
    const char *arrays[6];
    static const int array_places[6] = {0, 2, 3, 4, 5, 7};
    for (int i = 0; i < 6; i++) {
        arrays[i] = memory(&buffers, args[array_places[i]], 0, 0);
        if (!arrays[i]) break;
    }
    int64_t *out = PyErr_Occurred() ? NULL : memory(&buffers, args[12], 0, 1);
    if (!out) {
        release(&buffers);
        return NULL;
    }
    const char *tokens = arrays[0], *pointers = arrays[1], *lengths = arrays[2];
    const char *documents = arrays[3], *samples = arrays[4], *order = arrays[5];
    int64_t num_bytes = buffers.views[0].len, num_sequences = buffers.views[1].len / 8;
    int64_t num_positions = buffers.views[3].len / 4;
    int64_t num_rows = buffers.views[4].len / (samples_wide ? 16 : 8);
    int64_t num_samples = buffers.views[5].len / (shuffle_wide ? 8 : 4);
    int64_t capacity = buffers.views[6].len / 8;
    int64_t size = SIZE_OF_CODE[code], filled = 0;
    Seen seen = {0, 0, 0};
    if (buffers.views[2].len / 4 < num_sequences) num_sequences = buffers.views[2].len / 4;
    if (idx < 0) idx += num_samples; /* as arrays do */
    int is_wrong = idx < 0 || idx >= num_samples;
    int64_t sample = is_wrong ? 0 : load(order, idx, shuffle_wide, 0);
    is_wrong = is_wrong || sample < 0 || sample >= num_rows - 1 || extra < 0 || extra > 1;
    if (!is_wrong) {
        int64_t first = load(samples, 2 * sample, samples_wide, 1);
        int64_t first_offset = load(samples, 2 * sample + 1, samples_wide, 1);
        int64_t last = load(samples, 2 * sample + 2, samples_wide, 1);
        int64_t end = load(samples, 2 * sample + 3, samples_wide, 1);
        /* Offsets above any length: adding to them, or subtracting, could overflow. */
        is_wrong = first < 0 || first > last || last >= num_positions || end < -1 ||
                   end > INT32_MAX;
        if (!is_wrong) end += extra;
        /* The documents of a sample lie anywhere: let memory fetch their entries, then their first
         * tokens, all at once instead of one after the other. */
        for (int64_t position = first; position <= last && !is_wrong; position++) {
            uint32_t document = (uint32_t)load32(documents, position);
            if (document >= num_sequences) break;
            PREFETCH(pointers + 8 * (int64_t)document);
            PREFETCH(lengths + 4 * (int64_t)document);
        }
        for (int64_t position = first + 1; position <= last && !is_wrong; position++) {
            uint32_t document = (uint32_t)load32(documents, position);
            if (document >= num_sequences) break;
            int64_t at = load64(pointers, document);
            if (at >= 0 && at < num_bytes - 256)
                for (int line = 0; line < 256; line += 64) PREFETCH(tokens + at + line);
        }
        for (int64_t position = first; position <= last && !is_wrong; position++) {
            int32_t document = load32(documents, position);
            if (document < 0 || document >= num_sequences) {
                is_wrong = 1;
                break;
            }
            int64_t length = load32(lengths, document), at = load64(pointers, document);
            int64_t begin = position == first ? first_offset : 0;
            int64_t stop = position == last ? end : length;
            /* 0 <= begin <= stop <= length < 2^31: what is computed with them does not overflow,
             * while a pointer may be any number. */
            is_wrong = begin < 0 || stop < begin || stop > length ||
                       stop - begin > capacity - filled || at < 0 || at > num_bytes ||
                       stop * size > num_bytes - at;
            if (is_wrong) break;
            const char *source = tokens + at + begin * size;
            copy_tokens(code, source, stop - begin, pad, out + filled, &seen);
            filled += stop - begin;
        }
    }
    release(&buffers);
    if (is_wrong) {
        PyErr_SetString(PyExc_IndexError, "a sample reaches outside its documents");
        return NULL;
    }
    return Py_BuildValue("LLLL", (long long)filled, (long long)seen.lowest,
                         (long long)seen.highest, (long long)seen.num_pads);
}

/* index_end(lengths, pointers, documents, token_bytes): return the byte after the last sequence if
 * lengths, offsets and document boundaries agree, else -1; the caller then looks for the place. */
static PyObject *index_end(PyObject *self, PyObject *args) {
    PyObject *lengths_array, *pointers_array, *documents_array;
    long long token_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOL", &lengths_array, &pointers_array, &documents_array,
                          &token_bytes))
        return NULL;
    Buffers buffers = {.held = 0};
    const char *lengths = memory(&buffers, lengths_array, 0, 0);
    int64_t num_sequences = lengths ? buffers.views[0].len / 4 : 0;
    const char *pointers = lengths ? memory(&buffers, pointers_array, 8 * num_sequences, 0) : NULL;
    const char *documents = pointers ? memory(&buffers, documents_array, 8, 0) : NULL;
    if (documents && (token_bytes < 0 || token_bytes > 16))
        PyErr_SetString(PyExc_ValueError, "no token has so many bytes");
    if (PyErr_Occurred()) {
        release(&buffers);
        return NULL;
    }
    int64_t num_entries = buffers.views[2].len / 8, end = 0;
    int is_sound = 1;
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t sequence = 0; sequence < num_sequences && is_sound; sequence++) {
        int32_t length = load32(lengths, sequence);
        is_sound = length >= 0 && load64(pointers, sequence) == end &&
                   end <= INT64_MAX - (int64_t)INT32_MAX * 16;
        if (is_sound) end += length * token_bytes;
    }
    int64_t before = load64(documents, 0);
    is_sound = is_sound && before == 0;
    for (int64_t entry = 1; entry < num_entries && is_sound; entry++) {
        int64_t boundary = load64(documents, entry);
        is_sound = boundary >= before;
        before = boundary;
    }
    is_sound = is_sound && before == num_sequences;
    Py_END_ALLOW_THREADS;
    release(&buffers);
    return PyLong_FromLongLong(is_sound ? end : -1);
}

/* MT19937 (Matsumoto and Nishimura, ACM TOMACS 8(1), 1998), as numpy.random.RandomState runs it. */
#define STATE_WORDS 624

static void refill(uint32_t *key) {
    for (int i = 0; i < STATE_WORDS; i++) {
        uint32_t joined = (key[i] & 0x80000000U) | (key[(i + 1) % STATE_WORDS] & 0x7fffffffU);
        key[i] = key[(i + 397) % STATE_WORDS] ^ (joined >> 1) ^ (joined & 1 ? 0x9908b0dfU : 0);
    }
}

static uint32_t draw(uint32_t *key, int *position) {
    if (*position == STATE_WORDS) {
        refill(key);
        *position = 0;
    }
    uint32_t word = key[(*position)++];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680U;
    word ^= (word << 15) & 0xefc60000U;
    return word ^ (word >> 18);
}

#define AHEAD 32

/* shuffle(array of 4-byte entries, key, position): exchange the last entry with one up to it, and
 * so on downwards, drawing as RandomState.shuffle does. key [624] is updated; return the new
 * position. Places are drawn a few ahead of the exchanges, so that memory can fetch them. */
static PyObject *shuffle(PyObject *self, PyObject *args) {
    PyObject *entries_array, *key_array;
    int position;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOi", &entries_array, &key_array, &position)) return NULL;
    Buffers buffers = {.held = 0};
    uint32_t *entries = memory(&buffers, entries_array, 0, 1);
    uint32_t *key = entries ? memory(&buffers, key_array, 4 * STATE_WORDS, 1) : NULL;
    if (!key || position < 0 || position > STATE_WORDS || buffers.views[0].len >> 34) {
        release(&buffers);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no state or array to shuffle");
        return NULL;
    }
    int64_t last = buffers.views[0].len / 4 - 1;
    Py_BEGIN_ALLOW_THREADS;
    uint32_t mask = 0;
    uint32_t places[AHEAD];
    for (int64_t top = last; top > 0; top -= AHEAD) {
        int64_t bottom = top - AHEAD > 0 ? top - AHEAD : 0;
        for (int64_t i = top; i > bottom; i--) {
            mask = (uint32_t)i;
            for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
            uint32_t place;
            while ((place = draw(key, &position) & mask) > (uint32_t)i) {
            }
            places[top - i] = place;
            PREFETCH(entries + place);
        }
        for (int64_t i = top; i > bottom; i--) {
            uint32_t held = entries[i];
            entries[i] = entries[places[top - i]];
            entries[places[top - i]] = held;
        }
    }
    Py_END_ALLOW_THREADS;
    release(&buffers);
    return PyLong_FromLong(position);
}

static PyMethodDef METHODS[] = {
    {"sample_index", sample_index, METH_VARARGS, "Find where each sample begins."},
    {"walk_blend", walk_blend, METH_VARARGS, "Choose the datasets of a run of samples."},
    {"index_end", index_end, METH_VARARGS, "Check an index."},
    {"shuffle", shuffle, METH_VARARGS, "Shuffle as RandomState does."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "Copy the tokens of a sample."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_native", "Inner loops of the data path.", -1, METHODS,
    NULL, NULL, NULL, NULL,
};

/* Which source this was compiled from: see native.py, which looks for it before it is loaded. */
#ifndef SOURCE_HASH
#define SOURCE_HASH "unknown"
#endif

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddStringConstant(module, "SOURCE", "source-hash:" SOURCE_HASH) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
