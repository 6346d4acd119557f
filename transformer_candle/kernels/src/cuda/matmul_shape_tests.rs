//! Row-major GEMMs as column-major ones, beside a plain loop that computes what the library does.

use proptest::prelude::*;

use super::super::{Scales, Workspace};
use super::*;
use crate::linear::{backward_input_gemm, backward_weight_gemm, forward_gemm, reference};
use crate::testing::*;
use crate::{Buffer, DeviceKind};

/// Computes what the library does in the memory of three column-major matrices, for each GEMM of a batch:
/// `result = left right` or `result += left right`.
fn library(matmul: ColumnMajorMatmul, left: &[f64], right: &[f64], result: &mut [f64], write_mode: WriteMode) {
    let ColumnMajorMatmul { left: l, right: r, result: out } = matmul;
    assert!(l.batch == out.batch && r.batch == out.batch);
    let inner = if l.transposed { l.rows } else { l.columns };
    for one in 0..out.batch {
        let at = |matrix: ColumnMajor, row: usize, column: usize| {
            let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
            assert!(row < matrix.rows && column < matrix.columns && matrix.rows <= matrix.leading, "{matrix:?}");
            row + (one * matrix.columns + column) * matrix.leading
        };
        for (column, row) in (0..out.columns * out.rows).map(|index| (index / out.rows, index % out.rows)) {
            let sum: f64 = (0..inner).map(|k| left[at(l, row, k)] * right[at(r, k, column)]).sum();
            let index = at(out, row, column);
            result[index] = sum + if write_mode == WriteMode::Accumulate { result[index] } else { 0.0 };
        }
    }
}

/// A stored matrix [rows, columns] whose rows have `more` elements between them.
fn stored(seed: u64, [rows, columns]: [usize; 2], more: usize, transposed: bool) -> (Buffer, [usize; 2]) {
    let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
    (buffer(&numbers(seed, rows * (columns + more)), &[rows, columns + more], DType::F32), [rows, columns])
}

fn values(buffer: &Buffer) -> Vec<f64> {
    buffer.read::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn write_modes() -> impl Strategy<Value = WriteMode> {
    prop_oneof![Just(WriteMode::Overwrite), Just(WriteMode::Accumulate)]
}

/// An element type of operands, and the blocks of its scales.
fn operand_types() -> impl Strategy<Value = (DType, Option<ScaleBlock>)> {
    let fp8 = proptest::sample::select(ScaleBlock::ALL.to_vec()).prop_map(|block| (DType::F8E4M3, Some(block)));
    prop_oneof![Just((DType::F32, None)), Just((DType::BF16, None)), fp8]
}

proptest! {
    #[test]
    fn a_row_major_gemm_is_a_column_major_one_with_operands_swapped(
        [m, n, k] in prop::array::uniform3(1usize..7),
        [more_a, more_b, more_c] in prop::array::uniform3(0usize..4),
        [transpose_a, transpose_b] in prop::array::uniform2(any::<bool>()),
        write_mode in write_modes(),
    ) {
        let ((a, [_, wide_a]), (b, [_, wide_b])) = (stored(1, [m, k], more_a, transpose_a), stored(2, [k, n], more_b, transpose_b));
        let (c, _) = stored(3, [m, n], more_c, false);
        let operand = |buffer: &Buffer, transpose: bool| if transpose { Operand::from(buffer).transposed() } else { buffer.into() };
        let (space, sizes) = (Workspace::from_buffer(&workspace(0)), [m, n, k]);
        let matmul = Matmul::set((&c).into(), sizes, operand(&a, transpose_a), operand(&b, transpose_b), space);
        let matmul = Matmul { write_mode, ..matmul };

        let (a, b, start) = (values(&a), values(&b), values(&c));
        let mut result = start.clone();
        library(Shape::new(&matmul).column_major(), &b, &a, &mut result, write_mode);

        let element = |values: &[f64], wide: usize, transpose: bool, row: usize, column: usize| {
            if transpose { values[column * wide + row] } else { values[row * wide + column] }
        };
        let mut expected = start;
        for (row, column) in (0..m * n).map(|at| (at / n, at % n)) {
            let sum: f64 = (0..k).map(|inner| {
                element(&a, wide_a + more_a, transpose_a, row, inner) * element(&b, wide_b + more_b, transpose_b, inner, column)
            }).sum();
            let target = &mut expected[row * (n + more_c) + column];
            *target = sum + if write_mode == WriteMode::Accumulate { *target } else { 0.0 };
        }
        prop_assert_eq!(result, expected);
    }

    #[test]
    fn the_gemms_of_a_linear_map_equal_its_reference([n, i, o] in prop::array::uniform3(1usize..9)) {
        let (sizes, space) = ([n, i, o], workspace(0));
        let [x, w, dy, dw] = [(n, i), (o, i), (n, o), (o, i)].map(|(rows, columns)| {
            buffer(&numbers((rows * 100 + columns) as u64, rows * columns), &[rows, columns], DType::F32)
        });
        let (y, dx) = (zeros(&[n, o], DType::F32), zeros(&[n, i], DType::F32));
        let run = |matmul: &Matmul, a: &Buffer, b: &Buffer, c: &Buffer| {
            assert_eq!([matmul.a.address, matmul.b.address, matmul.c.address], [a, b, c].map(Buffer::address));
            let mut result = values(c);
            library(Shape::new(matmul).column_major(), &values(b), &values(a), &mut result, matmul.write_mode);
            result
        };
        let near = |left: &[f64], right: &[f64]| left.iter().zip(right).all(|(left, right)| (left - right).abs() < 1e-9);

        let forward = run(&forward_gemm(&x, &w).on_gpu(&y, None, &space), &x, &w, &y);
        prop_assert!(near(&forward, &reference::forward(&values(&x), &values(&w), sizes)));
        let backward_input = run(&backward_input_gemm(&dy, &w).on_gpu(&dx, None, &space), &dy, &w, &dx);
        prop_assert!(near(&backward_input, &reference::backward_input(&values(&dy), &values(&w), sizes)));
        let gradient = reference::backward_weight(&values(&dy), &values(&x), sizes);
        let total: Vec<f64> = values(&dw).iter().zip(&gradient).map(|(start, more)| start + more).collect();
        for (write_mode, expected) in [(WriteMode::Overwrite, gradient), (WriteMode::Accumulate, total)] {
            let backward_weight = backward_weight_gemm(&dy, &x, write_mode).on_gpu(&dw, None, &space);
            prop_assert!(near(&run(&backward_weight, &dy, &x, &dw), &expected));
        }
    }

    #[test]
    fn a_batch_is_the_gemms_of_its_matrices(
        [batch, m, n] in prop::array::uniform3(1usize..5),
        k in 1usize..5,
        [transpose_a, transpose_b] in prop::array::uniform2(any::<bool>()),
    ) {
        let values = |seed, [rows, columns]: [usize; 2]| numbers(seed, batch * rows * columns);
        let operand = |values: &[f64], [rows, columns]: [usize; 2], transpose: bool| {
            let [rows, columns] = if transpose { [columns, rows] } else { [rows, columns] };
            let buffer = buffer(values, &[batch, rows, columns], DType::F32);
            if transpose { Operand::from(&buffer).transposed() } else { (&buffer).into() }
        };
        let (a, b) = (values(1, [m, k]), values(2, [k, n]));
        let c = operand(&vec![0.0; batch * m * n], [m, n], false);
        let space = Workspace::from_buffer(&workspace(0));
        let one = Matmul::set(c, [m, n, k], operand(&a, [m, k], transpose_a), operand(&b, [k, n], transpose_b), space);
        let run = |matmul: &Matmul, a: &[f64], b: &[f64], c: &mut [f64]| {
            library(Shape::new(matmul).column_major(), b, a, c, WriteMode::Overwrite);
        };
        let [mut batched, mut separate] = [(); 2].map(|()| vec![0.0; batch * m * n]);
        run(&Matmul { batch, ..one }, &a, &b, &mut batched);
        for ((a, b), c) in a.chunks(m * k).zip(b.chunks(k * n)).zip(separate.chunks_mut(m * n)) {
            run(&one, a, b, c);
        }
        prop_assert_eq!(batched, separate);
    }

    #[test]
    fn a_shape_is_read_back_from_its_text(
        batch in 0usize..100,
        sizes in prop::array::uniform3(0usize..100_000),
        strides in prop::array::uniform3(1usize..100_000),
        [transpose_a, transpose_b] in prop::array::uniform2(any::<bool>()),
        write_mode in write_modes(),
        alignments in prop::array::uniform3(0u32..9),
        (dtype, scales) in operand_types(),
    ) {
        let layout = |at: usize, dtype, transposed| Layout { dtype, stride: strides[at], transposed, alignment: 1 << alignments[at] };
        let (a, b, c) = (layout(0, dtype, transpose_a), layout(1, dtype, transpose_b), layout(2, DType::F32, false));
        let shape = Shape { sizes, batch, a, b, c, write_mode, scales };
        prop_assert_eq!(shape.to_string().parse(), Ok(shape));
    }

    #[test]
    fn text_that_is_no_shape_is_refused(text in ".{0,60}") {
        prop_assert_eq!(text.parse::<Shape>(), Err(NoShape));
    }
}

#[test]
fn a_shape_is_shown_as_readable_text() {
    let (dy, x, dw) = (zeros(&[6, 4], DType::BF16), zeros(&[6, 3], DType::BF16), zeros(&[4, 3], DType::F32));
    let aligned = |matmul: &Matmul| {
        let mut shape = Shape::new(matmul);
        for layout in [&mut shape.a, &mut shape.b, &mut shape.c] {
            layout.alignment = 256;
        }
        shape.to_string()
    };
    let space = workspace(0);
    let gradient = backward_weight_gemm(&dy, &x, WriteMode::Accumulate).on_gpu(&dw, None, &space);
    assert_eq!(aligned(&gradient), "4x3x6 a bf16 4 transposed @256, b bf16 3 @256, c += f32 3 @256");
    let forward = forward_gemm(&x, &dw).on_gpu(&dy, None, &space);
    assert_eq!(aligned(&forward), "6x4x3 a bf16 3 @256, b f32 3 transposed @256, c bf16 4 @256");
    let fp8 = Matmul { scales: Some(Scales { block: ScaleBlock::Square32, a: 0, b: 0 }), ..forward };
    assert_eq!(aligned(&fp8), "Square32 6x4x3 a bf16 3 @256, b f32 3 transposed @256, c bf16 4 @256");
    for wrong in [
        "",
        "Square64 6x4x3 a f8e4m3 3 @256, b f8e4m3 3 transposed @256, c bf16 4 @256",
        "6x4 a bf16 3 @256, b f32 3 @256, c bf16 4 @256",
        "6x4x3 a bf16 3 @256, b f32 3 sideways @256, c bf16 4 @256",
    ] {
        assert_eq!(wrong.parse::<Shape>(), Err(NoShape), "{wrong}");
    }
}

#[test]
fn an_alignment_is_never_more_than_the_address_has() {
    let promised = |address: usize| alignment(address);
    assert_eq!([0x1000, 0x1100, 0x1080, 0x1010, 0x1008, 0x1004, 0x1002].map(promised), [256, 256, 16, 16, 8, 4, 2]);
    for address in 1usize..5000 {
        assert!(address.is_multiple_of(alignment(address) as usize), "{address}");
    }
}

#[test]
fn invalid_gemm_operands_are_refused() {
    let (x, w, y) = (zeros(&[4, 3], DType::F32), zeros(&[5, 3], DType::F32), zeros(&[4, 5], DType::F32));
    let space = workspace(crate::linear::workspace_elements(4, 3, 5, DeviceKind::Cuda));
    let matmul = |x: Operand| {
        Matmul::set((&y).into(), [4, 5, 3], x, Operand::from(&w).transposed(), Workspace::from_buffer(&space))
    };
    let problem = |matmul: Matmul| matmul.check().unwrap_err().to_string();
    let whole = Operand::from(&x);
    matmul(whole).check().unwrap();
    let wide = Matmul::set((&y).into(), [4, 5, 3], whole, Operand::from(&w), Workspace::from_buffer(&space));
    assert!(problem(wide).contains("lies outside of its buffer"));
    assert!(problem(matmul(whole.skip_rows(1))).contains("lies outside of its buffer"));
    assert!(problem(matmul(whole.skip_rows(9))).contains("lies outside of its buffer"));
    let narrow = whole.reinterpreted(DType::BF16);
    assert_eq!((narrow.stride, narrow.address), (6, whole.address));
    assert!(problem(matmul(narrow)).contains("no matmul of (BF16, F32, F32)"), "{}", problem(matmul(narrow)));
    let turned = Operand::from(&zeros(&[5, 5], DType::F32)).transposed();
    assert!(problem(Matmul { c: turned, ..matmul(whole) }).contains("lies outside"));
    let small = Workspace::from_buffer(&workspace(1000));
    assert!(problem(Matmul { workspace: small, ..matmul(whole) }).contains("33554432 are needed"));
}

#[test]
fn a_workspace_is_aligned_to_256_bytes_in_any_buffer() {
    let space = workspace(super::super::WORKSPACE_ELEMENTS + 100);
    for offset in 0..100 {
        let part = Workspace::from_buffer(&space.view(offset, &[super::super::WORKSPACE_ELEMENTS]).unwrap());
        assert!(part.address.is_multiple_of(256) && part.bytes >= 32 << 20, "{part:?}");
    }
}

#[test]
fn only_linear_maps_of_few_rows_go_unsearched() {
    let shape = |text: &str| text.parse::<Shape>().unwrap();
    let linear = |m: usize| shape(&format!("{m}x512x256 a bf16 256 @256, b bf16 256 transposed @256, c bf16 512 @256"));
    assert!([1, 33, 128].into_iter().all(|m| linear(m).is_linear_of_few_rows()));
    assert!(!linear(129).is_linear_of_few_rows());
    for gradient in [
        "33x256x512 a bf16 512 @256, b bf16 256 @256, c bf16 256 @256",
        "96x64x33 a bf16 96 transposed @256, b bf16 64 @256, c f32 64 @256",
        "96x64x33 a bf16 96 transposed @256, b bf16 64 @256, c += f32 64 @256",
    ] {
        assert!(!shape(gradient).is_linear_of_few_rows(), "{gradient}");
    }
}
