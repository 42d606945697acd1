// The loss of rows of logits, which become their gradients in place: a threadgroup a row. And the sum of all rows' losses.

struct Losses { uint columns; uint gradient; float scale; };
struct Sum { uint count; float scale; };

// A target that is not predicted.
constant uint IGNORE = 0xFFFFFFFF;

template <typename T>
kernel void cross_entropy(
    device T* logits [[buffer(0)]],
    device const uint* targets [[buffer(1)]],
    device float* losses [[buffer(2)]],
    constant Losses& n [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    device T* x = logits + ulong(row) * n.columns;
    uint target = targets[row];
    // The same for the whole threadgroup, so no thread misses a barrier.
    if (target == IGNORE) {
        for (uint c = thread_index; c < n.columns; c += 256) {
            put(x[c], 0.0f);
        }
        if (thread_index == 0) {
            losses[row] = 0.0f;
        }
        return;
    }
    float most = number(x[target]), at_target = most;
    for (uint c = thread_index; c < n.columns; c += 256) {
        most = max(most, number(x[c]));
    }
    most = max_of_group(most, shared, lane, simdgroup, 8);
    float sum = 0.0f;
    for (uint c = thread_index; c < n.columns; c += 256) {
        sum += exp(number(x[c]) - most);
    }
    sum = sum_of_group(sum, shared, lane, simdgroup, 8);
    // The target's logit was read by all before its owner changes it.
    threadgroup_barrier(mem_flags::mem_device);
    if (n.gradient) {
        for (uint c = thread_index; c < n.columns; c += 256) {
            float p = exp(number(x[c]) - most) * (n.scale / sum);
            put(x[c], c == target ? p - n.scale : p);
        }
    }
    if (thread_index == 0) {
        losses[row] = log(sum) + (most - at_target);
    }
}

// One threadgroup: partial sums in a fixed order.
kernel void sum_losses(
    device const float* losses [[buffer(0)]],
    device float* total [[buffer(1)]],
    constant Sum& n [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    float sum = 0.0f;
    for (uint i = thread_index; i < n.count; i += 256) {
        sum += losses[i];
    }
    sum = sum_of_group(sum, shared, lane, simdgroup, 8);
    if (thread_index == 0) {
        total[0] = sum * n.scale;
    }
}

instantiate_types("cross_entropy", cross_entropy)
