// The element-wise parts of Muon; its products are matrix products. All of a parameter's parts lie one after the other.

struct Gathering { uint count; float momentum; };
struct Polynomial { uint count; uint small; float a; float b; float c; };
struct Applying { uint count; float weight_decay; float scale; };
struct Count { uint count; };

constant uint LEARNING_RATE = 0;
constant uint CLIP = 3;
constant uint SKIP = 4;

// The momentum with this gradient in it, and in `update` as it will be after one more such gradient (Nesterov).
kernel void muon_gather(
    device const float* gradient [[buffer(0)]],
    device float* momentum [[buffer(1)]],
    device float* update [[buffer(2)]],
    device const float* scalars [[buffer(3)]],
    constant Gathering& n [[buffer(4)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count && scalars[SKIP] == 0.0f) {
        float g = (1.0f - n.momentum) * scalars[CLIP] * gradient[i];
        float m = fma(n.momentum, momentum[i], g);
        momentum[i] = m;
        update[i] = fma(n.momentum, m, g);
    }
}

// x = x / (norm + 1e-7)
kernel void muon_normalise(
    device float* x [[buffer(0)]],
    device const float* norm [[buffer(1)]],
    constant Count& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        x[i] *= 1.0f / (norm[0] + 1e-7f);
    }
}

// p = c p + b g, and a more on the diagonal.
kernel void muon_polynomial(
    device float* p [[buffer(0)]],
    device const float* g [[buffer(1)]],
    constant Polynomial& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        float x = fma(n.c, p[i], n.b * g[i]);
        p[i] = i / n.small == i % n.small ? x + n.a : x;
    }
}

kernel void muon_apply(
    device float* master [[buffer(0)]],
    device const float* update [[buffer(1)]],
    device const float* scalars [[buffer(2)]],
    constant Applying& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count && scalars[SKIP] == 0.0f) {
        float lr = scalars[LEARNING_RATE];
        master[i] -= fma(lr * n.weight_decay, master[i], lr * n.scale * update[i]);
    }
}
