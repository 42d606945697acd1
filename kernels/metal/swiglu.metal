// silu(gate) * up for rows of gate and up (N, 2F), a thread an element of (N, F).

struct Gated { uint count; uint width; };
struct GatedBackward { uint count; uint width; uint add; };

template <typename T>
kernel void swiglu(
    device const T* gate_up [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant Gated& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        ulong at = ulong(i / n.width) * 2 * n.width + i % n.width;
        float gate = number(gate_up[at]);
        put(y[i], gate * sigmoid(gate) * number(gate_up[at + n.width]));
    }
}

template <typename T>
kernel void swiglu_backward(
    device const T* gate_up [[buffer(0)]],
    device const T* dy [[buffer(1)]],
    device T* dgate_up [[buffer(2)]],
    constant GatedBackward& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        ulong at = ulong(i / n.width) * 2 * n.width + i % n.width;
        float gate = number(gate_up[at]), up = number(gate_up[at + n.width]), own = number(dy[i]);
        float s = sigmoid(gate);
        // silu' = s + gate s (1 - s)
        store(dgate_up[at], own * up * fma(gate * s, 1.0f - s, s), n.add);
        store(dgate_up[at + n.width], own * gate * s, n.add);
    }
}

instantiate_types("swiglu", swiglu)
instantiate_types("swiglu_backward", swiglu_backward)
