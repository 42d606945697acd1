// Whole tensors, element by element: sums of gradients, copies, constants.

struct Count { uint count; };
struct Filling { uint count; float value; };

template <typename T>
kernel void add(
    device T* x [[buffer(0)]],
    device const T* y [[buffer(1)]],
    constant Count& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        put(x[i], number(x[i]) + number(y[i]));
    }
}

template <typename T>
kernel void copy(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant Count& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        y[i] = x[i];
    }
}

template <typename T>
kernel void fill(
    device T* x [[buffer(0)]],
    constant Filling& n [[buffer(1)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        put(x[i], n.value);
    }
}

instantiate_types("add", add)
instantiate_types("copy", copy)
instantiate_types("fill", fill)
