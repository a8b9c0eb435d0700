// Operands that ggml's CPU kernels do not take: asked of the graph, before a decode fails for them or writes past them.
#include <algorithm>

#include "probe_memory.h"

namespace pykv {

namespace {

// The kernel steps over a head by as many values at once, and writes the last ones whole: 64 with AVX-512, 32 with AVX2,
// 16 with NEON. All known models of the architecture have heads of 64.
constexpr int64_t WKV7_STEP = 64;

bool is_float(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }
// Types that matrices are stored in. The other quantised ones are for what lies between two kernels.
bool is_stored(ggml_type type) {
    return is_float(type) || (ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K);
}
bool is_whole(ggml_type type) { return type >= GGML_TYPE_I8 && type <= GGML_TYPE_I64; }

// A weight that lies where the CPU computes with it; other devices have other kernels.
bool is_weight(const ggml_tensor * t) {
    const ggml_tensor * base = t->view_src ? t->view_src : t;
    return base->op == GGML_OP_NONE && base->buffer && ggml_backend_buffer_is_host(base->buffer) &&
           ggml_backend_buffer_get_usage(base->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool takes_weight(const ggml_tensor * node, int i) {
    const ggml_type type = node->src[i]->type;
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_SET_ROWS:
            return true;
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return is_stored(type) || type == GGML_TYPE_I32;
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            return i == 0 ? is_stored(type) : i == 1 ? type == GGML_TYPE_F32 || type == node->src[0]->type : type == GGML_TYPE_I32;
        case GGML_OP_GET_ROWS:
            return type == GGML_TYPE_I32 || (i == 0 && is_stored(type));
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            return type == GGML_TYPE_F32 || (is_float(type) && (i == 0 || type == node->src[0]->type));
        case GGML_OP_CONCAT:
        case GGML_OP_REPEAT:
            return is_float(type) || type == GGML_TYPE_I32;
        case GGML_OP_UNARY:
            return is_float(type);
        case GGML_OP_IM2COL:
        case GGML_OP_IM2COL_3D:
        case GGML_OP_CONV_2D:
        case GGML_OP_CONV_2D_DW:
        case GGML_OP_CONV_3D:
        case GGML_OP_CONV_TRANSPOSE_1D:
        case GGML_OP_CONV_TRANSPOSE_2D:
            return type == GGML_TYPE_F32 || type == GGML_TYPE_F16;
        default:
            return type == GGML_TYPE_F32;
    }
}

// Rows of a table of ids are ids, and no numbers to compute with.
bool computes(ggml_op op) {
    switch (op) {
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_MUL_MAT:
        case GGML_OP_SCALE:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_GROUP_NORM:
        case GGML_OP_UNARY:
            return true;
        default:
            return false;
    }
}

}  // namespace

std::string operand_fault(const ggml_tensor * node) {
    if (node->op == GGML_OP_RWKV_WKV7 && node->src[1]->ne[0] % WKV7_STEP != 0) {
        return "the model's heads have " + std::to_string(node->src[1]->ne[0]) +
               " values (wkv.head_size): the kernel of its architecture takes multiples of " + std::to_string(WKV7_STEP);
    }
    if (node->op == GGML_OP_SSM_SCAN && node->src[1]->ne[1] % std::max<int64_t>(1, node->src[4]->ne[1]) != 0) {
        return "a state-space layer has " + std::to_string(node->src[1]->ne[1]) + " heads (ssm.time_step_rank) in " +
               std::to_string(node->src[4]->ne[1]) + " groups (ssm.group_count), which do not divide them";
    }
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        const ggml_tensor * t = node->src[i];
        if (t && ((is_weight(t) && !takes_weight(node, i)) || (i < 2 && is_whole(t->type) && computes(node->op)))) {
            return std::string(t->name) + " has the type " + ggml_type_name(t->type) + ", which " + ggml_op_desc(node) +
                   " does not take here";
        }
    }
    return {};
}

}  // namespace pykv
