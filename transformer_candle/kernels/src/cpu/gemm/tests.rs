//! Every micro-kernel that this CPU can run, against the plain loop.

use std::fmt::Debug;

use pulp::Scalar;

use super::blocks::Blocks;
use super::micro_kernel::MicroKernel;
use super::*;
use crate::bf16;

/// Small integers, which bf16 holds and of which every order of summing gives the same f32.
fn integers<E: Element>(count: usize, seed: usize) -> Vec<E> {
    (0..count).map(|i| E::narrow(((i * 7 + seed * 13) % 17) as f32 - 8.0)).collect()
}

/// A matrix whose stored rows lie further apart than they are long, by `gap`.
fn matrix<E: Element>(values: &[E], rows: usize, columns: usize, transposed: bool, gap: usize) -> Matrix<'_, E> {
    if transposed {
        Matrix::strided(values, columns, rows, rows + gap).transposed()
    } else {
        Matrix::strided(values, rows, columns, columns + gap)
    }
}

fn at<E: Element>(matrix: Matrix<'_, E>, row: usize, column: usize) -> f32 {
    let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
    matrix.values[row * matrix.stride + column].widen()
}

/// Sizes [M, N, K], with several blocks of K and of columns, and full panels of every micro-kernel.
const SIZES: [[usize; 3]; 13] = [
    [1, 1, 1],
    [3, 40, 5],
    [14, 32, 2],
    [31, 70, 33],
    [70, 200, 16],
    [84, 96, 40],
    [129, 33, 64],
    [96, 64, 544],
    [5, 9, 0],
    [20, 64, 0],
    [17, 35, 2101],
    [2, 1100, 1030],
    [1300, 1, 1025],
];

fn equals_the_plain_loop<T: MicroKernel, E: Element>(kernel: T) {
    equals_the_plain_loop_of::<T, E>(kernel, &SIZES);
}

fn equals_the_plain_loop_of<T: MicroKernel, E: Element>(kernel: T, sizes: &[[usize; 3]]) {
    gemm_equals_the_plain_loop::<T, E, f32>(kernel, sizes, &[WriteMode::Overwrite, WriteMode::Accumulate]);
    gemm_equals_the_plain_loop::<T, E, bf16>(kernel, sizes, &[WriteMode::Overwrite]);
}

fn gemm_equals_the_plain_loop<T: MicroKernel, E: Element, O: Element + PartialEq + Debug>(
    kernel: T,
    sizes: &[[usize; 3]],
    write_modes: &[WriteMode],
) {
    for &[m, n, k] in sizes {
        let room = (m + 4) * (k + 4) + (n + 4) * (k + 4);
        let (a, b, before) = (integers::<E>(room, 1), integers::<E>(room, 2), integers::<O>(m * (n + 1), 3));
        for layout in 0..8 {
            // Rows begin at a whole word, or in the middle of one.
            let gap = 3 + layout / 4;
            let (a, b) = (matrix(&a, m, k, layout & 1 != 0, gap), matrix(&b, k, n, layout & 2 != 0, gap));
            let blocks = [Blocks::IN_L3, Blocks::IN_L2][usize::from(layout & 4 != 0)];
            for &write_mode in write_modes {
                let mut out = before.clone();
                let mut workspace = vec![f32::NAN; workspace_for(m, n, k)];
                Gemm { a, b, out: &mut out, stride: n + 1, write_mode, workspace: &mut workspace }
                    .multiply_in(blocks, kernel);
                for (index, &value) in out.iter().enumerate() {
                    let (row, column) = (index / (n + 1), index % (n + 1));
                    let sum: f32 = (0..k).map(|depth| at(a, row, depth) * at(b, depth, column.min(n - 1))).sum();
                    let start = if write_mode == WriteMode::Accumulate { before[index].widen() } else { 0.0 };
                    let expected = if column < n { O::narrow(start + sum) } else { before[index] };
                    assert_eq!(value, expected, "{m} {n} {k}, layout {layout}, element {row} {column}");
                }
            }
        }
    }
}

#[test]
fn f32_kernels_equal_the_plain_loop() {
    equals_the_plain_loop::<_, f32>(F32Kernel::<Scalar, 6, 2>(Scalar));
    equals_the_plain_loop::<_, bf16>(F32Kernel::<Scalar, 14, 2>(Scalar));
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V3::try_new() {
        equals_the_plain_loop::<_, f32>(F32Kernel::<_, 6, 2>(simd));
        equals_the_plain_loop::<_, bf16>(F32Kernel::<_, 6, 2>(simd));
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V4::try_new() {
        equals_the_plain_loop::<_, f32>(F32Kernel::<_, 14, 2>(simd));
        equals_the_plain_loop::<_, bf16>(F32Kernel::<_, 14, 2>(simd));
        equals_the_plain_loop::<_, f32>(avx512_kernel::Avx512Kernel(simd));
        equals_the_plain_loop::<_, bf16>(avx512_kernel::Avx512Kernel(simd));
    }
}

#[test]
fn avx512_bf16_kernels_equal_the_plain_loop() {
    #[cfg(target_arch = "x86_64")]
    if let Some(pairs) = bf16_kernel::Bf16Kernel::if_available() {
        equals_the_plain_loop::<_, bf16>(pairs);
        equals_the_plain_loop::<_, f32>(pairs);
    }
}

/// AMX's instructions, executed by the processor or else by the emulator, for which the largest size is left out.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_kernels_equal_the_plain_loop() {
    if let Some(tiles) = Amx::or_emulated().map(amx_kernel::AmxKernel) {
        equals_the_plain_loop_of::<_, bf16>(tiles, &SIZES[..12]);
        equals_the_plain_loop_of::<_, f32>(tiles, &SIZES[..9]);
    }
}

#[test]
fn mixed_operands_are_rounded_for_a_bf16_result_only() {
    let small = 2f32.powi(-10);
    let (a, b) = ([1.0 + small, -1.0, 1.0 + small, -1.0], [bf16::ONE; 2]);
    let (a, b, mut workspace) = (Matrix::new(&a, 2, 2), Matrix::new(&b, 2, 1), vec![0f32; workspace_for(2, 1, 2)]);
    let (mut exact, mut rounded) = ([0f32; 2], [bf16::ONE; 2]);
    multiply(a, b, &mut exact, 1, &mut workspace);
    multiply(a, b, &mut rounded, 1, &mut workspace);
    assert_eq!(exact, [small; 2]);
    let expected = if Bf16Units::of_this_processor() == Bf16Units::F32 { small } else { 0.0 };
    assert_eq!(rounded, [bf16::from_f32(expected); 2]);
}

#[test]
fn partial_sums_over_k_are_not_rounded_to_bf16() {
    let (m, n, k) = (1100, 1000, 1100);
    let numbers = |seed, count| crate::testing::to_f32(&crate::testing::numbers(seed, count));
    let (a, b, mut workspace) = (numbers(1, m * k), numbers(2, n * k), vec![f32::NAN; workspace_for(m, n, k)]);
    let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, n, k).transposed());
    let (mut rounded, mut exact) = (vec![bf16::ZERO; m * n], vec![0f32; m * n]);
    multiply(a, b, &mut rounded, n, &mut workspace);
    multiply(a, b, &mut exact, n, &mut workspace);
    assert!(rounded.iter().zip(&exact).all(|(&rounded, &exact)| rounded == bf16::narrow(exact)));
}

#[test]
fn f32_results_do_not_depend_on_the_kernel_or_the_blocks() {
    // Panels of several heights, and operands packed and in place.
    for (m, n, k) in [(4, 50, 40), (5, 64, 1030), (20, 50, 300), (25, 200, 64), (70, 96, 1100)] {
        let (a, b) = (
            crate::testing::to_f32(&crate::testing::numbers(1, m * k)),
            crate::testing::to_f32(&crate::testing::numbers(2, k * n)),
        );
        for layout in 0..4 {
            let (a, b) = (matrix(&a, m, k, layout & 1 != 0, 0), matrix(&b, k, n, layout & 2 != 0, 0));
            let result_of = |multiply: &dyn Fn(Gemm<'_, f32, f32, f32>)| {
                let (mut out, mut workspace) = (vec![0f32; m * n], vec![0f32; workspace_for(m, n, k)]);
                let (stride, write_mode) = (n, WriteMode::Overwrite);
                multiply(Gemm { a, b, out: &mut out, stride, write_mode, workspace: &mut workspace });
                out
            };
            let expected = result_of(&|gemm| Arch::new().dispatch(WidestF32(gemm)));
            for blocks in [Blocks::IN_L3, Blocks::IN_L2] {
                #[cfg(target_arch = "x86_64")]
                if let Some(simd) = pulp::x86::V3::try_new() {
                    assert_eq!(result_of(&|gemm| gemm.multiply_in(blocks, F32Kernel::<_, 6, 2>(simd))), expected);
                }
                #[cfg(target_arch = "x86_64")]
                if let Some(simd) = V4::try_new() {
                    assert_eq!(result_of(&|gemm| gemm.multiply_in(blocks, F32Kernel::<_, 14, 2>(simd))), expected);
                    let in_assembly = avx512_kernel::Avx512Kernel(simd);
                    assert_eq!(result_of(&|gemm| gemm.multiply_in(blocks, in_assembly)), expected);
                }
            }
        }
    }
}

#[test]
fn a_gemv_equals_a_row_of_a_gemm() {
    let (n, k) = (70, 150);
    let (a, b) = (integers::<bf16>(k, 1), integers::<bf16>(n * k, 2));
    let (a, b) = (Matrix::new(&a, 1, k), Matrix::new(&b, n, k).transposed());
    let mut out = vec![0f32; n];
    multiply(a, b, &mut out, n, &mut []);
    let expected: Vec<f32> =
        (0..n).map(|column| (0..k).map(|depth| at(a, 0, depth) * at(b, depth, column)).sum()).collect();
    assert_eq!(out, expected);
}

#[test]
fn panels_cover_every_row_once_and_divide_by_threads() {
    type F32 = micro_kernel::F32Kernel<Scalar, 14, 2>;
    for (rows, threads) in (1..400).flat_map(|rows| (1..9).map(move |threads| (rows, threads))) {
        let panels = pack::Panels::new::<F32>(rows, threads);
        let all: Vec<_> = (0..panels.count).map(|number| panels.rows(number..number + 1)).collect();
        assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start) && all[0].start == 0);
        assert_eq!(all.last().map(|rows| rows.end), Some(rows));
        assert!(all.iter().all(|rows| (1..=F32::MR).contains(&rows.len()) && rows.len() + 1 >= all[0].len()));
        // Where panels do not become much smaller by it.
        if rows >= 7 * threads * F32::MR {
            assert!(panels.count.is_multiple_of(threads), "{rows} rows, {threads} threads: {}", panels.count);
        }
    }
}
