// The product that is added to the residual stream, behind cluster_tiles.cu and its Mma.

namespace {
// fp32 of a line of sums: rows 8 apart in different banks.
template <int COLS> struct Sums { static constexpr int STRIDE = COLS % 32 == 0 || COLS % 32 == 16 ? COLS + 8 : COLS; };

// stream += x weight^T, rounded; rows = the new stream times norm, rounded; squares[n, s]: fp32, of the s-th tile of columns.
template <int COLS, int STAGES, int C> __device__ __forceinline__ void add(
    const TensorMap* x_map, const TensorMap* w_map, unsigned short* stream, const unsigned short* norm, unsigned short* rows,
    float* squares, int num_rows, int num_inputs, int num_columns, int tile_rows) {
  extern __shared__ unsigned char memory[];
  using St = Stages<COLS, STAGES, 1>;
  constexpr int STRIDE = Sums<COLS>::STRIDE, OWN_ROWS = ROWS / C;
  const St st{(shared_address(memory) + 1023) & ~1023u};
  const unsigned parts = st.base + (St::BYTES + 127) / 128 * 128;  // fp32 [C, OWN_ROWS, STRIDE]
  const unsigned rank = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x / C, column = tile * COLS;
  const int steps = num_inputs / TILE_K / C;
  Bring b{x_map, w_map, (int)rank * steps * TILE_K, steps, 0, tile_rows, COLS, column, 0, 1};
  if (warp == WARPS && lane == 0) {
    prefetch_map(w_map);
    prefetch_map(x_map);
    begin<St, STAGES, 1>(st, b);
  }
  __syncwarp();
  cluster_meet();
  __syncthreads();
  if (warp == WARPS) {
    if (lane == 0) bring_all<St, STAGES, 1>(st, b, 0);
    __syncwarp();
    cluster_wait();
    cluster_meet();
    cluster_wait();
    return;
  }
  const int group = warp >> 2;
  const bool is_active = group * 64 < tile_rows;
  float sums[COLS / 2];
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) sums[i] = 0.0f;
  multiply<St, COLS, STAGES, 1>(st, sums, steps, group, is_active);
  __syncwarp();
  cluster_wait();  // every program of the cluster is there
  if (is_active) {
    const unsigned to = at_rank(parts, warp * C / WARPS) +
                        ((rank * OWN_ROWS + warp % (WARPS / C) * 16 + (lane >> 2)) * STRIDE + (lane & 3) * 2) * 4;
#pragma unroll
    for (int j = 0; j < COLS / 8; ++j) {
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(to + j * 32), "f"(sums[4 * j]), "f"(sums[4 * j + 1]) : "memory");
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(to + j * 32 + 8 * STRIDE * 4), "f"(sums[4 * j + 2]), "f"(sums[4 * j + 3]) : "memory");
    }
  }
  __syncwarp();
  cluster_arrive();
  constexpr int LANES = 2 * C, PIECES = COLS / 8, ROUNDS = (PIECES + LANES - 1) / LANES;  // lanes of a row
  const int own_row = threadIdx.x / LANES, row = rank * OWN_ROWS + own_row, q = threadIdx.x % LANES;
  uint4 old[ROUNDS], scale[ROUNDS];
  grid_wait();
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int piece = q + i * LANES, c = column + piece * 8;
    old[i] = scale[i] = make_uint4(0, 0, 0, 0);
    if (row < num_rows && piece < PIECES && c < num_columns) {
      old[i] = *reinterpret_cast<const uint4*>(stream + (long long)row * num_columns + c);
      scale[i] = *reinterpret_cast<const uint4*>(norm + c);
    }
  }
  __syncwarp();
  cluster_wait();
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int piece = q + i * LANES, c = column + piece * 8;
    if (row < num_rows && piece < PIECES && c < num_columns) {
      float v[8] = {};
#pragma unroll
      for (int p = 0; p < C; ++p) {
        const unsigned from = parts + ((p * OWN_ROWS + own_row) * STRIDE + piece * 8) * 4;
        float t[8];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(t[0]), "=f"(t[1]), "=f"(t[2]), "=f"(t[3]) : "r"(from) : "memory");
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(t[4]), "=f"(t[5]), "=f"(t[6]), "=f"(t[7]) : "r"(from + 16) : "memory");
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += t[e];
      }
      const unsigned o[4] = {old[i].x, old[i].y, old[i].z, old[i].w}, m[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
      unsigned sum[4], out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[e] = pack(v[2 * e] + low_of(o[e]), v[2 * e + 1] + high_of(o[e]));
        const float low = low_of(sum[e]), high = high_of(sum[e]);
        square += low * low;
        square += high * high;
        out[e] = pack(low * low_of(m[e]), high * high_of(m[e]));
      }
      *reinterpret_cast<uint4*>(stream + (long long)row * num_columns + c) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
      *reinterpret_cast<uint4*>(rows + (long long)row * num_columns + c) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
#pragma unroll
  for (int far = 1; far < LANES; far *= 2) square += __shfl_xor_sync(~0u, square, far);
  if (q == 0 && row < num_rows) squares[(long long)row * (gridDim.x / C) + tile] = square;
}
}  // namespace

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(THREADS, 1) KERNEL(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, unsigned short* stream,
    const unsigned short* norm, unsigned short* rows, float* squares, int num_rows, int num_inputs, int num_columns,
    int tile_rows) {
  add<COLUMNS, FILLS, PROGRAMS>(&x, &w, stream, norm, rows, squares, num_rows, num_inputs, num_columns, tile_rows);
}
