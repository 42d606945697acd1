// AdamW in one pass, and the averaged weights. The numbers of the step lie on the device (src/ops/scalars.rs has their order).

struct Adamw { uint count; float beta1; float beta2; float log_beta1; float log_beta2; float epsilon; float weight_decay; };
struct Count { uint count; };

constant uint LEARNING_RATE = 0;
constant uint CLIP = 3;
constant uint SKIP = 4;
constant uint UPDATES = 5;
constant uint EMA_DECAY = 6;

// 1 - e^x for x <= 0, without cancellation near zero.
inline float one_less_exp(float x) {
    if (x < -0.3f) {
        return 1.0f - exp(x);
    }
    float sum = 0.0f;
    for (uint i = 9; i > 0; --i) {
        sum = x / float(i) * (1.0f + sum);
    }
    return -sum;
}

kernel void adamw(
    device float* master [[buffer(0)]],
    device const float* gradient [[buffer(1)]],
    device float* first [[buffer(2)]],
    device float* second [[buffer(3)]],
    device const float* scalars [[buffer(4)]],
    constant Adamw& n [[buffer(5)]],
    uint i [[thread_position_in_grid]])
{
    if (i >= n.count || scalars[SKIP] != 0.0f) {
        return;
    }
    float t = scalars[UPDATES] + 1.0f, lr = scalars[LEARNING_RATE];
    float rate = lr / one_less_exp(t * n.log_beta1);
    float second_scale = 1.0f / sqrt(one_less_exp(t * n.log_beta2));
    float g = gradient[i] * scalars[CLIP];
    float m = fma(n.beta1, first[i], (1.0f - n.beta1) * g);
    float v = fma(n.beta2, second[i], (1.0f - n.beta2) * g * g);
    first[i] = m;
    second[i] = v;
    // One subtraction: 1 - decay would lose the decay's lower bits.
    master[i] -= fma(lr * n.weight_decay, master[i], rate * m / fma(sqrt(v), second_scale, n.epsilon));
}

// ema = decay * ema + (1 - decay) * master, with a decay that is short at first.
kernel void average(
    device const float* master [[buffer(0)]],
    device float* ema [[buffer(1)]],
    device const float* scalars [[buffer(2)]],
    constant Count& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count && scalars[SKIP] == 0.0f) {
        float updates = scalars[UPDATES];
        float decay = min(scalars[EMA_DECAY], (1.0f + updates) / (10.0f + updates));
        ema[i] = fma(decay, ema[i], (1.0f - decay) * master[i]);
    }
}
