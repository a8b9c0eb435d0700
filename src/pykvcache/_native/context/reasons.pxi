# Why a memory cannot shift, in words.

cdef dict _NO_SHIFT = {
    lib.SHIFT_MULTI_POS: "M-RoPE stores several positions per token, which llama.cpp cannot shift",
    lib.SHIFT_ARCH: "llama.cpp cannot rotate the keys of this architecture again",
    lib.SHIFT_NO_ROPE: "a part of this cache has no rotary layer (NoPE), which llama.cpp cannot shift",
    lib.SHIFT_BF16: "keys stored as bf16 cannot be rotated; create the context with type_k='f16'",
    lib.SHIFT_QUANTIZED: "llama.cpp cannot rotate quantised keys whose head size is not a multiple "
                         "of 64, or with LLAMA_ATTN_ROT_DISABLE; create the context with type_k='f16'",
    lib.SHIFT_PARTIAL: "llama.cpp cannot rotate quantised keys of which RoPE turns a part; "
                       "create the context with type_k='f16'",
    lib.SHIFT_OTHERWISE: "llama.cpp would rotate keys of this model in another way than its graph does",
    lib.SHIFT_TABLE: "the keys and values of this model were computed from positions in a learned table",
    lib.SHIFT_SCALED: "RoPE changes the length of this model's keys, in each part by another factor",
}

# Other types of K would do.
cdef tuple _NO_SHIFT_OF_TYPE = (lib.SHIFT_BF16, lib.SHIFT_QUANTIZED, lib.SHIFT_PARTIAL)
