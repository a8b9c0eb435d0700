/* Part of careful.h, in front of ggml.c: operations on weights that a file lacks.
 *
 * llama.cpp lets a file leave out weights that the graph of its architecture then reads without asking (Falcon-H1's
 * ssm_conv1d.bias). Where ggml would read through NULL, an assertion fails instead, which guarded.h catches. */
#pragma once

#include <stdarg.h>
#include <stdio.h>

#include "ggml.h"

typedef struct ggml_tensor  pykv_tensor;
typedef struct ggml_context pykv_context;

static inline pykv_tensor * pykv_given(pykv_tensor * operand, const char * operation) {
    if (!operand) {
        GGML_ABORT("the model lacks a weight that its graph reads (an operand of %s)", operation);
    }
    return operand;
}

/* ggml divides by how many matrices there are: none, where a layer has no heads for keys. */
static inline pykv_tensor * pykv_some(pykv_tensor * operand, const char * operation) {
    pykv_given(operand, operation);
    if (operand->ne[2] == 0 || operand->ne[3] == 0) {
        GGML_ABORT("a layer of the model has nothing to compute with (an operand of %s is empty)", operation);
    }
    return operand;
}

/* Multiplication calls the dot product of the type: of these it has none, and reads through NULL. */
static inline pykv_tensor * pykv_dotted(pykv_tensor * weight, const char * operation) {
    pykv_some(weight, operation);
    if (weight->type == GGML_TYPE_Q8_1 || weight->type == GGML_TYPE_Q8_K || weight->type == GGML_TYPE_F64 ||
        (weight->type >= GGML_TYPE_I8 && weight->type <= GGML_TYPE_I64)) {
        GGML_ABORT("%s has the type %s, which %s does not read", weight->name, ggml_type_name(weight->type), operation);
    }
    return weight;
}

/* Of a layer that has experts and uses none, nothing comes out. */
static inline pykv_tensor * pykv_chosen(pykv_tensor * ids, const char * operation) {
    pykv_given(ids, operation);
    if (ids->ne[0] == 0) {
        GGML_ABORT("a layer of the model has experts and uses none of them (expert_used_count)");
    }
    return ids;
}

/* ggml's own function gets another name, by the macros below; this one takes its place. */
#define PYKV_GIVEN(op, parameters, arguments)                \
    pykv_tensor * pykv_##op parameters;                      \
    pykv_tensor * op parameters { return pykv_##op arguments; }

#define PYKV_GIVEN_2(op)                                                                                     \
    PYKV_GIVEN(op, (pykv_context * ctx, pykv_tensor * a, pykv_tensor * b), \
               (ctx, pykv_given(a, #op), pykv_given(b, #op)))

#define PYKV_GIVEN_3(op)                                                                                     \
    PYKV_GIVEN(op, (pykv_context * ctx, pykv_tensor * a, pykv_tensor * b, pykv_tensor * c), \
               (ctx, pykv_given(a, #op), pykv_given(b, #op), pykv_given(c, #op)))

PYKV_GIVEN_2(ggml_add)
PYKV_GIVEN_2(ggml_sub)
PYKV_GIVEN_2(ggml_mul)
PYKV_GIVEN_2(ggml_div)
PYKV_GIVEN(ggml_mul_mat, (pykv_context * ctx, pykv_tensor * a, pykv_tensor * b),
           (ctx, pykv_dotted(a, "ggml_mul_mat"), pykv_given(b, "ggml_mul_mat")))
PYKV_GIVEN(ggml_flash_attn_ext,
           (pykv_context * ctx, pykv_tensor * q, pykv_tensor * k, pykv_tensor * v, pykv_tensor * mask, float scale,
            float max_bias, float softcap),
           (ctx, pykv_given(q, "ggml_flash_attn_ext"), pykv_some(k, "ggml_flash_attn_ext"),
            pykv_some(v, "ggml_flash_attn_ext"), mask, scale, max_bias, softcap))
PYKV_GIVEN_2(ggml_get_rows)
PYKV_GIVEN_2(ggml_repeat)
PYKV_GIVEN_2(ggml_ssm_conv)
PYKV_GIVEN(ggml_mul_mat_id, (pykv_context * ctx, pykv_tensor * a, pykv_tensor * b, pykv_tensor * ids),
           (ctx, pykv_dotted(a, "ggml_mul_mat_id"), pykv_given(b, "ggml_mul_mat_id"), pykv_chosen(ids, "ggml_mul_mat_id")))
PYKV_GIVEN_3(ggml_add_id)
PYKV_GIVEN(ggml_concat, (pykv_context * ctx, pykv_tensor * a, pykv_tensor * b, int dim),
           (ctx, pykv_given(a, "ggml_concat"), pykv_given(b, "ggml_concat"), dim))
PYKV_GIVEN(ggml_cont, (pykv_context * ctx, pykv_tensor * a), (ctx, pykv_given(a, "ggml_cont")))
PYKV_GIVEN(ggml_transpose, (pykv_context * ctx, pykv_tensor * a), (ctx, pykv_given(a, "ggml_transpose")))
PYKV_GIVEN(ggml_cast, (pykv_context * ctx, pykv_tensor * a, enum ggml_type type), (ctx, pykv_given(a, "ggml_cast"), type))
PYKV_GIVEN(ggml_reshape_1d, (pykv_context * ctx, pykv_tensor * a, int64_t n0), (ctx, pykv_given(a, "ggml_reshape_1d"), n0))
PYKV_GIVEN(ggml_reshape_2d, (pykv_context * ctx, pykv_tensor * a, int64_t n0, int64_t n1),
           (ctx, pykv_given(a, "ggml_reshape_2d"), n0, n1))
PYKV_GIVEN(ggml_reshape_3d, (pykv_context * ctx, pykv_tensor * a, int64_t n0, int64_t n1, int64_t n2),
           (ctx, pykv_given(a, "ggml_reshape_3d"), n0, n1, n2))
PYKV_GIVEN(ggml_reshape_4d, (pykv_context * ctx, pykv_tensor * a, int64_t n0, int64_t n1, int64_t n2, int64_t n3),
           (ctx, pykv_given(a, "ggml_reshape_4d"), n0, n1, n2, n3))
PYKV_GIVEN(ggml_view_1d, (pykv_context * ctx, pykv_tensor * a, int64_t n0, size_t at),
           (ctx, pykv_given(a, "ggml_view_1d"), n0, at))
PYKV_GIVEN(ggml_view_2d, (pykv_context * ctx, pykv_tensor * a, int64_t n0, int64_t n1, size_t nb1, size_t at),
           (ctx, pykv_given(a, "ggml_view_2d"), n0, n1, nb1, at))

/* What a graph computes gets a name, and so does what nothing computed. */
pykv_tensor * ggml_format_name(pykv_tensor * tensor, const char * format, ...) {
    if (!tensor) {
        GGML_ABORT("the model lacks what its graph gives a name: a weight, or what its experts give (expert_used_count)");
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(tensor->name, sizeof(tensor->name), format, arguments);
    va_end(arguments);
    return tensor;
}
#define ggml_format_name pykv_ggml_format_name

#define ggml_add        pykv_ggml_add
#define ggml_sub        pykv_ggml_sub
#define ggml_mul        pykv_ggml_mul
#define ggml_div        pykv_ggml_div
#define ggml_mul_mat    pykv_ggml_mul_mat
#define ggml_get_rows   pykv_ggml_get_rows
#define ggml_repeat     pykv_ggml_repeat
#define ggml_ssm_conv   pykv_ggml_ssm_conv
#define ggml_mul_mat_id pykv_ggml_mul_mat_id
#define ggml_flash_attn_ext pykv_ggml_flash_attn_ext
#define ggml_add_id     pykv_ggml_add_id
#define ggml_concat     pykv_ggml_concat
#define ggml_cont       pykv_ggml_cont
#define ggml_transpose  pykv_ggml_transpose
#define ggml_cast       pykv_ggml_cast
#define ggml_reshape_1d pykv_ggml_reshape_1d
#define ggml_reshape_2d pykv_ggml_reshape_2d
#define ggml_reshape_3d pykv_ggml_reshape_3d
#define ggml_reshape_4d pykv_ggml_reshape_4d
#define ggml_view_1d    pykv_ggml_view_1d
#define ggml_view_2d    pykv_ggml_view_2d
