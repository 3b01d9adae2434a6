// The gated product, behind cluster_tiles.cu and its Mma.

namespace {
__device__ __forceinline__ float silu_times(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// COLS: columns of a program, of the gate and of up each, a multiple of 8 up to 64.
template <int COLS, int STAGES, int C> __device__ __forceinline__ void gated(
    const TensorMap* x_map, const TensorMap* w_map, unsigned short* out, const float* squares, int num_squares, float eps,
    int num_rows, int num_inputs, int num_columns, int slice_rows) {
  extern __shared__ unsigned char memory[];
  using St = Stages<2 * COLS, STAGES, C>;
  const St st{(shared_address(memory) + 1023) & ~1023u};
  const unsigned rank = C == 1 ? 0 : cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = blockIdx.x * COLS;
  Bring b{x_map, w_map, 0, num_inputs / TILE_K, 0, slice_rows, COLS, column, num_columns + column, column < num_columns ? 2 : 0};
  if (warp == WARPS && lane == 0) {
    prefetch_map(w_map);
    prefetch_map(x_map);
    begin<St, STAGES, C>(st, b);
  }
  __syncwarp();
  if (C == 1) __syncthreads();
  else { cluster_meet(); cluster_wait(); }
  if (warp == WARPS) {
    if (lane == 0) bring_all<St, STAGES, C>(st, b, rank);
    return;
  }
  const int group = warp >> 2, row = warp * 16 + (lane >> 2);  // and row + 8
  const bool is_active = group * 64 < C * slice_rows;
  float factor[2] = {1.0f, 1.0f};
  if (squares != nullptr) {
    grid_wait();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;  // a quad has the row: each lane a quarter of its squares, then in fixed order
      if (row + 8 * h < num_rows)
        for (int i = lane & 3; i < num_squares; i += 4) sum += squares[(long long)(row + 8 * h) * num_squares + i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      factor[h] = rsqrtf(__fdividef(sum, (float)num_inputs) + eps);
    }
  }
  float sums[COLS];
#pragma unroll
  for (int i = 0; i < COLS; ++i) sums[i] = 0.0f;
  multiply<St, 2 * COLS, STAGES, C>(st, sums, b.steps, group, is_active);
  if (!is_active) return;
  // Through the warpgroup's rows of the stage whose fill is the oldest, which has been read and no one brings any more: lines of
  // 8 pieces of 16 bytes, the pieces of line r in the order i ^ (r % 8). A warp reads what it has written.
  const unsigned tile = st.x(b.steps % STAGES) + warp * 16 * LINE;
#pragma unroll
  for (int j = 0; j < COLS / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* gate = sums + 4 * j + 2 * h;
      const float* up = gate + COLS / 2;
      const unsigned pair = pack(silu_times(gate[0] * factor[h], up[0] * factor[h]), silu_times(gate[1] * factor[h], up[1] * factor[h]));
      const int r = (lane >> 2) + 8 * h;
      asm volatile("st.shared.b32 [%0], %1;" :: "r"(tile + r * LINE + ((j ^ (r & 7)) << 4) + (lane & 3) * 4), "r"(pair) : "memory");
    }
  }
  __syncwarp();
  constexpr int PIECES = COLS / 8;
  for (int i = lane; i < 16 * PIECES; i += 32) {
    const int r = i / PIECES, piece = i % PIECES;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(tile + r * LINE + ((piece ^ (r & 7)) << 4)) : "memory");
    if (warp * 16 + r < num_rows && column + piece * 8 < num_columns)
      *reinterpret_cast<uint4*>(out + (long long)(warp * 16 + r) * num_columns + column + piece * 8) = v;
  }
}
}  // namespace

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(THREADS, 1) KERNEL(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, unsigned short* out, const float* squares,
    int num_squares, float eps, int num_rows, int num_inputs, int num_columns, int slice_rows) {
  gated<COLUMNS, FILLS, PROGRAMS>(&x, &w, out, squares, num_squares, eps, num_rows, num_inputs, num_columns, slice_rows);
}
