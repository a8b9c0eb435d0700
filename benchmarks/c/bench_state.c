// Group 4: states in memory and in files.
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "bench.h"

// Keep the state of sequence 0, and write it as llama.cpp's own file.
void do_keep_state(void) {
    llama_token * tokens;
    int           n = (int) number("n", 0);
    blob_size = llama_state_seq_get_size(ctx, 0);
    blob = realloc(blob, blob_size);
    blob_size = llama_state_seq_get_data(ctx, blob, blob_size, 0);
    tokens = malloc(((size_t) n + 1) * sizeof(llama_token));
    for (int i = 0; i < n; ++i) {
        tokens[i] = token_at(i);
    }
    if (find("path")) {
        llama_state_seq_save_file(ctx, text("path"), 0, tokens, (size_t) n);
    }
    free(tokens);
    printf("{\"bytes\": %zu}\n", blob_size);
}

// Read a raw sequence state from a file into sequence 0, and keep it for "state".
void do_load_blob(void) {
    FILE * file = fopen(text("path"), "rb");
    fseek(file, 0, SEEK_END);
    blob_size = (size_t) ftell(file);
    rewind(file);
    blob = realloc(blob, blob_size);
    size_t got = fread(blob, 1, blob_size, file);
    fclose(file);
    llama_memory_clear(mem, false);
    got = got == blob_size ? llama_state_seq_set_data(ctx, blob, blob_size, 0) : 0;
    printf("{\"bytes\": %zu}\n", got);
}

void do_state(void) {
    char      what[32];
    uint8_t * out = malloc(blob_size + 4096);
    double    best = 1e9;
    snprintf(what, sizeof what, "%s", text("what"));
    const bool copies = is(what, "memcpy") || is(what, "memcpy_new");
    const bool saves = is(what, "save") || is(what, "save_new"), fresh = strstr(what, "_new");
    memset(out, 1, blob_size + 4096);
    for (long i = number("slices", 5); i > 0; --i) {
        if (is(what, "load")) {
            llama_memory_seq_rm(mem, 0, -1, -1);
        }
        double    t = now();
        // Vary the offset within a page, because some offsets halve the speed of 1 MiB and malloc's
        // is arbitrary.
        uint8_t * to = out + i % 16 * 256;
        if (fresh) {
            to = malloc(saves ? llama_state_seq_get_size(ctx, 0) : blob_size);
        }
        if (copies) {
            memcpy(to, blob, blob_size);
            __asm__ volatile("" ::"r"(to) : "memory");
        } else if (saves) {
            sink += (int64_t) llama_state_seq_get_data(ctx, to, blob_size, 0);
        } else {
            sink += (int64_t) llama_state_seq_set_data(ctx, blob, blob_size, 0);
        }
        if (fresh) {
            free(to);  // timed, because Python's objects are freed within the time too
        }
        t = now() - t;
        best = t < best ? t : best;
    }
    free(out);
    printf("{\"seconds\": %.9f, \"bytes\": %zu}\n", best, blob_size);
}

static int ascending(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

// Lower bound of any save: write as many existing bytes to a new file.
static void plain_write(const char * path) {
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    size_t    done = 0;
    while (file >= 0 && done < blob_size) {
        const ssize_t some = write(file, blob + done, blob_size - done);
        if (some <= 0) {
            break;
        }
        done += (size_t) some;
    }
    sink += (int64_t) done;
    if (file >= 0) {
        close(file);
    }
}

// llama.cpp's own files, overwritten or created. Returns the median, because the system's time
// depends on its pending writes.
void do_file(void) {
    char   what[32];
    int    n = (int) number("n", 0), slices = (int) number("slices", 5);
    size_t got = 0;
    snprintf(what, sizeof what, "%s", text("what"));
    const bool    loads = is(what, "file_load"), writes = is(what, "file_write");
    const bool    makes = writes || is(what, "file_make");
    llama_token * tokens = calloc((size_t) n + 1, sizeof(llama_token));
    double *      times = malloc((size_t) slices * sizeof(double));
    const char *  path = text("path");
    for (int i = -1; i < slices; ++i) {  // the first one does not count
        if (loads) {
            llama_memory_seq_rm(mem, 0, -1, -1);
        } else if (makes) {
            unlink(path);
        }
        double t = now();
        if (loads) {
            sink += (int64_t) llama_state_seq_load_file(ctx, path, 0, tokens, (size_t) n, &got);
        } else if (writes) {
            plain_write(path);
        } else {
            sink += (int64_t) llama_state_seq_save_file(ctx, path, 0, tokens, (size_t) n);
        }
        times[i < 0 ? 0 : i] = now() - t;
    }
    qsort(times, (size_t) slices, sizeof(double), ascending);
    printf("{\"seconds\": %.9f}\n", times[slices / 2]);
    free(tokens);
    free(times);
}
