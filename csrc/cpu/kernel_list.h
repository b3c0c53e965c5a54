// Every kernel: ANYCHIP_KERNEL(result, name, parameters) is what the includer makes of it, a field
// of KernelTable, a declaration, or a function of one instruction set.

ANYCHIP_KERNEL(void, to_float, (DType dtype, const void* from, float* to, int64_t numel))
ANYCHIP_KERNEL(void, from_float, (DType dtype, const float* from, void* to, int64_t numel))
ANYCHIP_KERNEL(void, add_to, (float* sum, const float* term, int64_t numel))

// Norms: weight and bias as float32; scratch: whole vectors for (hidden,). The backward adds this
// range's part of dweight and dbias to (hidden,) sums, where wanted.
ANYCHIP_KERNEL(void, rms_norm_forward,
               (const RmsNormForward&, const float* weight, float* scratch, Range rows))
ANYCHIP_KERNEL(void, rms_norm_backward,
               (const RmsNormBackward&, const float* weight, float* dweight, Range rows))
ANYCHIP_KERNEL(void, layer_norm_forward,
               (const LayerNormForward&, const float* weight, const float* bias, float* scratch,
                Range rows))
ANYCHIP_KERNEL(void, layer_norm_backward,
               (const LayerNormBackward&, const float* weight, float* dweight, float* dbias,
                Range rows))

// Of batch * groups, and of batch * channels; weights as float32. sums: of each channel in each
// part of the batch, of grad and of grad times what was normed, or what the taps and the bias get.
ANYCHIP_KERNEL(void, group_norm_forward,
               (const GroupNormForward&, const float* weight, const float* bias, Range rows))
ANYCHIP_KERNEL(void, group_norm_backward,
               (const GroupNormBackward&, const float* weight, float* sums, Range rows))
ANYCHIP_KERNEL(void, conv1d_forward,
               (const Conv1dForward&, const float* weight, const float* bias, float* scratch,
                Range rows))
ANYCHIP_KERNEL(void, conv1d_backward,
               (const Conv1dBackward&, const float* weight, float* sums, float* scratch,
                Range rows))
// Of each matrix, kTurnedColumns columns at a time.
ANYCHIP_KERNEL(void, turn, (const Turned&, Range parts))

ANYCHIP_KERNEL(void, dropout, (const Dropout&, Range elements))
// past: Note [Past the caches] of cache.h, here and below.
ANYCHIP_KERNEL(void, rope, (const Rope&, bool past, Range positions))  // of batch * seq

// Elements of rows that are as wide as `hidden` says: the last one may be shorter. bias as
// float32; the backward adds to (hidden,) sums, where wanted.
ANYCHIP_KERNEL(void, activation_forward,
               (const ActivationForward&, const float* bias, bool past, Range elements))
ANYCHIP_KERNEL(void, activation_backward,
               (const ActivationBackward&, const float* bias, float* dbias, bool past,
                Range elements))
ANYCHIP_KERNEL(void, bias_dropout_add, (const BiasDropoutAdd&, const float* bias, Range elements))
ANYCHIP_KERNEL(void, bias_dropout_backward,
               (const BiasDropoutBackward&, float* dbias, Range elements))

ANYCHIP_KERNEL(void, softmax_forward,
               (const SoftmaxForward&, float* scratch, Range rows))  // whole vectors for (keys,)
ANYCHIP_KERNEL(void, softmax_backward, (const SoftmaxBackward&, Range rows))

// Of positions that make one tile; scratch: attention_forward_scratch. The backward writes all of
// the group's gradients that are not null; scratch: attention_backward_scratch.
ANYCHIP_KERNEL(void, attention_forward,
               (const AttentionGroup&, void* y, float* scratch, Range positions))
ANYCHIP_KERNEL(void, attention_backward,
               (const AttentionGroup&, const AttentionGradients&, float* scratch))

// columns: of each row one logit, or -1 for none.
ANYCHIP_KERNEL(void, sum_logits,
               (DType dtype, const void* logits, int64_t vocab, const int64_t* columns,
                bool wants_total, LogitSums* sums, Range rows))
ANYCHIP_KERNEL(void, slope_logits,
               (DType dtype, const void* logits, int64_t vocab, const LogitSlopes* slopes,
                void* dlogits, Range rows))

ANYCHIP_KERNEL(void, sum_rows, (const RowSums&, Range rows))
ANYCHIP_KERNEL(void, spread_rows, (const RowSpread&, Range rows))

// Groups of whole blocks that begin at an even element; dequantize's scratch is that of quantize's
// codes, hadamard's: (elements,).
ANYCHIP_KERNEL(void, quantize, (const Quantize&, const QuantizeScratch&, Range elements))
ANYCHIP_KERNEL(void, dequantize, (const Dequantize&, uint8_t* scratch, Range elements))
ANYCHIP_KERNEL(void, hadamard, (const Hadamard&, float* scratch, Range elements))

// Of float32 matrices.
ANYCHIP_KERNEL(void, pack_left, (const PackedPart&, float* panels))
ANYCHIP_KERNEL(void, pack_right, (const PackedPart&, float* panels))
ANYCHIP_KERNEL(void, multiply_panels, (const ProductPart&))

// Of bfloat16 matrices.
ANYCHIP_KERNEL(void, pack_rows16, (const PackedPairs&, BFloat16* rows))
ANYCHIP_KERNEL(void, pack_panel16, (const PackedPairs&, BFloat16* panel))
ANYCHIP_KERNEL(void, write_sums, (const PairsResult&))

// Writes the places of the numbers of at least this size, in the order of x; returns how many.
ANYCHIP_KERNEL(int64_t, find_large,
               (DType dtype, const void* x, int64_t n, uint32_t smallest, uint64_t* found))

ANYCHIP_KERNEL(void, adamw, (const UpdateTensor&, const AdamWFactors&, Range elements))
ANYCHIP_KERNEL(void, adamw_8bit,  // whole blocks
               (const UpdateTensor&, const AdamWFactors&, Range elements))
ANYCHIP_KERNEL(void, sgd, (const UpdateTensor&, const SgdFactors&, Range elements))
ANYCHIP_KERNEL(void, lion, (const UpdateTensor&, const LionFactors&, Range elements))
ANYCHIP_KERNEL(void, lamb, (const UpdateTensor&, const LambFactors&, float rate, Range elements))

// Added to rows of kDigits: Note [Exact sums].
ANYCHIP_KERNEL(void, add_lamb_squares,
               (const UpdateTensor&, const LambFactors&, Range elements, int64_t* weights,
                int64_t* steps))
ANYCHIP_KERNEL(void, add_squares, (const TensorRef&, Range elements, int64_t* digits))
ANYCHIP_KERNEL(void, multiply, (const TensorRef&, float factor, Range elements))
ANYCHIP_KERNEL(bool, divide_and_check,
               (const TensorRef&, float divisor, Range elements))  // finite?
