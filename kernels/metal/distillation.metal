// The loss of a student's rows of logits against a teacher's, which become their gradients in place: a threadgroup a row.
// alpha T^2 D + (1 - alpha) (-ln p(target)), with D one of KL(q|p), KL(p|q) and their Jensen-Shannon mean.

struct Distillation { uint columns; uint divergence; float temperature; float alpha; float scale; };
struct DistillationTop { uint columns; uint top; uint divergence; float alpha; float scale; };

constant uint NO_TARGET = 0xFFFFFFFF;
constant uint KL_TEACHER = 0;
constant uint KL_STUDENT = 1;

struct Place { uint index; uint simdgroup; uint lane; };

inline float most_of(device const float* x, uint columns, threadgroup float* shared, Place place) {
    float most = LOWEST;
    for (uint c = place.index; c < columns; c += 256) {
        most = max(most, x[c]);
    }
    return max_of_group(most, shared, place.lane, place.simdgroup, 8);
}

// ln of the sum of exp((x - most) / temperature).
inline float log_sum(device const float* x, uint columns, float most, float temperature, threadgroup float* shared, Place place) {
    float sum = 0.0f;
    for (uint c = place.index; c < columns; c += 256) {
        sum += exp((x[c] - most) / temperature);
    }
    return log(sum_of_group(sum, shared, place.lane, place.simdgroup, 8));
}

inline float log_middle(float p, float q) {
    return log(max(0.5f * (p + q), 1.17549435e-38f));
}

// The divergence of one token of probabilities e^b (student) and e^a (teacher), and the slope by the student's logit before the
// mean of slopes is taken off; for KL(q|p) the whole gradient is p - q.
inline float2 token_divergence(uint divergence, float a, float b) {
    float q = exp(a), p = exp(b);
    if (divergence == KL_TEACHER) {
        return float2(q * (a - b), 0.0f);
    }
    if (divergence == KL_STUDENT) {
        return float2(p * (b - a), b - a);
    }
    float middle = log_middle(p, q);
    return float2(0.5f * (q * (a - middle) + p * (b - middle)), 0.5f * (b - middle));
}

kernel void distillation(
    device float* logits [[buffer(0)]],
    device const float* teacher [[buffer(1)]],
    device const uint* targets [[buffer(2)]],
    device float* losses [[buffer(3)]],
    constant Distillation& n [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    Place place = {thread_index, simdgroup, lane};
    device float* x = logits + ulong(row) * n.columns;
    device const float* t = teacher + ulong(row) * n.columns;
    uint target = targets[row];
    if (target == NO_TARGET) {
        for (uint c = thread_index; c < n.columns; c += 256) {
            x[c] = 0.0f;
        }
        if (thread_index == 0) {
            losses[row] = 0.0f;
        }
        return;
    }
    float at_target = x[target], temperature = n.temperature;
    float most = most_of(x, n.columns, shared, place), teacher_most = most_of(t, n.columns, shared, place);
    float plain = log_sum(x, n.columns, most, 1.0f, shared, place);
    float soft = log_sum(x, n.columns, most, temperature, shared, place);
    float teacher_soft = log_sum(t, n.columns, teacher_most, temperature, shared, place);
    float d = 0.0f, mean = 0.0f;
    for (uint c = thread_index; c < n.columns; c += 256) {
        float a = (t[c] - teacher_most) / temperature - teacher_soft, b = (x[c] - most) / temperature - soft;
        float2 token = token_divergence(n.divergence, a, b);
        d += token.x;
        mean += exp(b) * token.y;
    }
    d = sum_of_group(d, shared, lane, simdgroup, 8);
    mean = sum_of_group(mean, shared, lane, simdgroup, 8);
    // The target's logit was read by all before its owner changes it.
    threadgroup_barrier(mem_flags::mem_device);
    float weight = n.alpha * temperature * n.scale, hard = (1.0f - n.alpha) * n.scale;
    for (uint c = thread_index; c < n.columns; c += 256) {
        float a = (t[c] - teacher_most) / temperature - teacher_soft, b = (x[c] - most) / temperature - soft;
        float own = hard * exp(x[c] - most - plain);
        if (n.divergence == KL_TEACHER) {
            own += weight * (exp(b) - exp(a));
        } else {
            own += weight * exp(b) * (token_divergence(n.divergence, a, b).y - mean);
        }
        x[c] = c == target ? own - hard : own;
    }
    if (thread_index == 0) {
        float nll = plain + (most - at_target);
        losses[row] = (1.0f - n.alpha) * nll + n.alpha * temperature * temperature * d;
    }
}

// D of one token and its derivative by the student's probability.
inline float2 top_divergence(uint divergence, float p, float q) {
    if (divergence == KL_TEACHER) {
        return float2(q * log(q / p), -q / p);
    }
    if (divergence == KL_STUDENT) {
        return float2(p * log(p / q), log(p / q));
    }
    float middle = 0.5f * (p + q);
    return float2(0.5f * (q * log(q / middle) + p * log(p / middle)), 0.5f * log(p / middle));
}

// The same where only the teacher's likeliest tokens are known: the others are one token of what is left, for both models.
kernel void distillation_top(
    device float* logits [[buffer(0)]],
    device const uint* ids [[buffer(1)]],
    device const float* logprobs [[buffer(2)]],
    device const uint* targets [[buffer(3)]],
    device float* losses [[buffer(4)]],
    device float* slopes [[buffer(5)]],
    constant DistillationTop& n [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    Place place = {thread_index, simdgroup, lane};
    device float* x = logits + ulong(row) * n.columns;
    device float* slope = slopes + ulong(row) * n.columns;
    uint target = targets[row];
    if (target == NO_TARGET) {
        for (uint c = thread_index; c < n.columns; c += 256) {
            x[c] = 0.0f;
        }
        if (thread_index == 0) {
            losses[row] = 0.0f;
        }
        return;
    }
    float at_target = x[target];
    float most = most_of(x, n.columns, shared, place);
    float total = most + log_sum(x, n.columns, most, 1.0f, shared, place);
    float known_p = 0.0f, known_q = 0.0f;
    for (uint i = thread_index; i < n.top; i += 256) {
        known_p += exp(x[ids[row * n.top + i]] - total);
        known_q += exp(logprobs[row * n.top + i]);
    }
    known_p = sum_of_group(known_p, shared, lane, simdgroup, 8);
    known_q = sum_of_group(known_q, shared, lane, simdgroup, 8);
    float p_rest = max(1.0f - known_p, 1e-9f), q_rest = max(1.0f - known_q, 1e-9f);
    float2 rest = top_divergence(n.divergence, p_rest, q_rest);
    for (uint c = thread_index; c < n.columns; c += 256) {
        slope[c] = rest.y;
    }
    threadgroup_barrier(mem_flags::mem_device);
    float d = 0.0f, mean = 0.0f;
    for (uint i = thread_index; i < n.top; i += 256) {
        uint id = ids[row * n.top + i];
        float p = exp(x[id] - total), q = exp(logprobs[row * n.top + i]);
        float2 token = top_divergence(n.divergence, max(p, 1e-30f), max(q, 1e-30f));
        slope[id] = token.y;
        d += token.x;
        mean += p * token.y;
    }
    d = sum_of_group(d, shared, lane, simdgroup, 8) + rest.x;
    mean = sum_of_group(mean, shared, lane, simdgroup, 8) + p_rest * rest.y;
    threadgroup_barrier(mem_flags::mem_device);
    float hard = 1.0f - n.alpha;
    for (uint c = thread_index; c < n.columns; c += 256) {
        float p = exp(x[c] - total);
        float own = n.scale * p * (n.alpha * (slope[c] - mean) + hard);
        x[c] = c == target ? own - n.scale * hard : own;
    }
    if (thread_index == 0) {
        losses[row] = n.alpha * d + hard * (total - at_target);
    }
}
