//! The linear map y = x W^T and its gradients, each one GEMM.
//!
//! Legend: N tokens, I inputs, O outputs. Weights are stored [O, I]; transposes are strides, never copies.

use candle_core::DType;

use crate::cpu::gemm::workspace_for;
use crate::element::result_dtype;
use crate::matmul::{Gemm, SumOver, View, decoded_words};
use crate::{Buffer, DeviceKind, GemmOperand, Result, WriteMode, cuda};

/// `y_NO = x_NI w_OI^T`. All of one element type, F32 or BF16, but `y_NO` may be F32 beside BF16 operands: the sums
/// as they are. Beside fp8 operands it is BF16 or F32.
pub fn forward<'a>(
    x_NI: impl Into<GemmOperand<'a>>,
    w_OI: impl Into<GemmOperand<'a>>,
    y_NO: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let gemm = forward_gemm(x_NI, w_OI);
    let dtype = result_dtype(y_NO.dtype(), gemm.dtype);
    Gemm { dtype, ..gemm }.write_to("y_NO", y_NO, None, workspace)
}

/// `dx_NI = dy_NO w_OI`. All of one element type, F32 or BF16; or BF16 beside fp8 operands.
pub fn backward_input<'a>(
    dy_NO: impl Into<GemmOperand<'a>>,
    w_OI: impl Into<GemmOperand<'a>>,
    dx_NI: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    backward_input_gemm(dy_NO, w_OI).write_to("dx_NI", dx_NI, None, workspace)
}

/// `dw_OI = dy_NO^T x_NI` or `dw_OI += dy_NO^T x_NI` in F32; `dy_NO` and `x_NI` are F32, BF16 or fp8 alike.
pub fn backward_weight<'a>(
    dy_NO: impl Into<GemmOperand<'a>>,
    x_NI: impl Into<GemmOperand<'a>>,
    dw_OI: &mut Buffer,
    write_mode: WriteMode,
    workspace: &mut Buffer,
) -> Result<()> {
    backward_weight_gemm(dy_NO, x_NI, write_mode).write_to("dw_OI", dw_OI, None, workspace)
}

pub(crate) fn forward_gemm<'a>(x_NI: impl Into<GemmOperand<'a>>, w_OI: impl Into<GemmOperand<'a>>) -> Gemm<'a> {
    let x = View::of_operand("x_NI", x_NI, SumOver::Columns);
    let w = View::of_operand("w_OI", w_OI, SumOver::Columns);
    Gemm::new("linear::forward", x, w.transposed())
}

pub(crate) fn backward_input_gemm<'a>(dy_NO: impl Into<GemmOperand<'a>>, w_OI: impl Into<GemmOperand<'a>>) -> Gemm<'a> {
    let dy = View::of_operand("dy_NO", dy_NO, SumOver::Columns);
    let w = View::of_operand("w_OI", w_OI, SumOver::Rows);
    Gemm::new("linear::backward_input", dy, w)
}

pub(crate) fn backward_weight_gemm<'a>(
    dy_NO: impl Into<GemmOperand<'a>>,
    x_NI: impl Into<GemmOperand<'a>>,
    write_mode: WriteMode,
) -> Gemm<'a> {
    let dy = View::of_operand("dy_NO", dy_NO, SumOver::Rows);
    let x = View::of_operand("x_NI", x_NI, SumOver::Rows);
    Gemm { dtype: DType::F32, write_mode, ..Gemm::new("linear::backward_weight", dy.transposed(), x) }
}

/// Elements of F32 workspace that the three functions need for N tokens: on a CPU under 5.4 million, on a GPU 32 MiB.
pub fn workspace_elements(n: usize, inputs: usize, outputs: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cuda => cuda::WORKSPACE_ELEMENTS,
        DeviceKind::Cpu => {
            let gradients = workspace_for(n, inputs, outputs).max(workspace_for(outputs, inputs, n));
            workspace_for(n, outputs, inputs).max(gradients)
        }
    }
}

/// Elements of F32 workspace that the three functions need with fp8 operands: on a CPU for the numbers they stand for as
/// well.
pub fn fp8_workspace_elements(n: usize, inputs: usize, outputs: usize, device: DeviceKind) -> usize {
    let decoded = match device {
        DeviceKind::Cuda => 0,
        DeviceKind::Cpu => {
            let gemms = [[n, outputs, inputs], [n, inputs, outputs], [outputs, inputs, n]];
            gemms.into_iter().map(decoded_words).max().unwrap_or(0)
        }
    };
    workspace_elements(n, inputs, outputs, device) + decoded
}

/// The plain version.
pub mod reference {
    use crate::Real;

    /// `x_NI w_OI^T`.
    pub fn forward<R: Real>(x_NI: &[R], w_OI: &[R], [n, i, o]: [usize; 3]) -> Vec<R> {
        let sum = |row: usize, output: usize| (0..i).map(|k| x_NI[row * i + k] * w_OI[output * i + k]).sum();
        (0..n * o).map(|at| sum(at / o, at % o)).collect()
    }

    /// `dy_NO w_OI`.
    pub fn backward_input<R: Real>(dy_NO: &[R], w_OI: &[R], [n, i, o]: [usize; 3]) -> Vec<R> {
        let sum = |row: usize, input: usize| (0..o).map(|k| dy_NO[row * o + k] * w_OI[k * i + input]).sum();
        (0..n * i).map(|at| sum(at / i, at % i)).collect()
    }

    /// `dy_NO^T x_NI`.
    pub fn backward_weight<R: Real>(dy_NO: &[R], x_NI: &[R], [n, i, o]: [usize; 3]) -> Vec<R> {
        let sum = |output: usize, input: usize| (0..n).map(|k| dy_NO[k * o + output] * x_NI[k * i + input]).sum();
        (0..o * i).map(|at| sum(at / i, at % i)).collect()
    }
}

/// Calls for checks and benchmarks, of sizes [N, I, O].
pub mod cases {
    use super::{backward_input, backward_weight, forward, fp8_workspace_elements, workspace_elements};
    use crate::cases::bounds::F32_SUM;
    use crate::cases::{self, Case, CaseList, Inputs, Size};
    use crate::fp8::{self, Codes, ScaleBlock};
    use crate::{Buffer, DType, WriteMode};

    pub(crate) fn add(size: Size, _dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[5, 64, 48]],
            Size::Medium => vec![[300, 96, 160]],
            Size::Full => {
                vec![[37, 80, 48], [1000, 1536, 2560], [2048, 2048, 3072], [2048, 2048, 16_384], [2048, 8192, 2048]]
            }
        };
        for sizes in sizes {
            list.add(move |inputs| output(inputs, sizes));
            list.add(move |inputs| input_gradient(inputs, sizes));
            for write_mode in [WriteMode::Overwrite, WriteMode::Accumulate] {
                list.add(move |inputs| weight_gradient(inputs, sizes, write_mode));
            }
        }
    }

    /// The sizes of fp8 GEMMs are multiples of 16.
    pub(crate) fn add_fp8(size: Size, dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[16, 64, 48]],
            Size::Medium => vec![[304, 96, 160]],
            Size::Full => vec![[48, 80, 272], [1008, 1536, 2560], [8192, 2048, 16_384], [8192, 8192, 2048]],
        };
        for sizes in sizes.into_iter().filter(|_| dtype == DType::BF16) {
            for block in ScaleBlock::ALL {
                list.add(move |inputs| in_fp8(inputs, sizes, block));
            }
        }
    }

    /// All three operations with operands rounded to fp8.
    pub fn in_fp8(inputs: &mut Inputs, sizes @ [n, i, o]: [usize; 3], block: ScaleBlock) -> Case {
        let operands = [("x", [n, i]), ("w", [o, i]), ("dy", [n, o])];
        let mut case = case(inputs, "linear fp8", sizes).in_given_types().multiplies_in_fp8(block);
        case.sizes = format!("{}, {block:?}", case.sizes);
        for (name, sizes) in operands {
            case = case.input(name, &sizes, inputs.numbers(&sizes));
        }
        let case = case
            .output("y", &[n, o], DType::BF16, inputs.bound())
            .output("dx", &[n, i], DType::BF16, inputs.bound())
            .updated("dw", &[o, i], inputs.f32(&[o, i]), F32_SUM)
            .workspace(move |device| fp8_workspace_elements(n, i, o, device));
        let codes = operands.into_iter().flat_map(|(_, [rows, columns])| [[rows, columns], [columns, rows]]);
        let case = codes.fold(case, |case, sizes| {
            let (dtype, scales) = block.scales(sizes);
            case.scratch("codes", &sizes, DType::U8).scratch("scales", &scales, dtype)
        });
        case.call(move |[x, w, dy, y, dx, dw, workspace, codes @ ..]: [&mut Buffer; 19]| {
            let [x_fp8, w_fp8, dy_fp8] = [0, 4, 8].map(|first| {
                let codes = |at: usize| Codes { values: codes[at].clone(), scales: codes[at + 1].clone() };
                fp8::Operand { block, codes_RC: Some(codes(first)), codes_CR: Some(codes(first + 2)) }
            });
            for (x, mut operand) in [(&*x, x_fp8.clone()), (w, w_fp8.clone()), (dy, dy_fp8.clone())] {
                fp8::quantize(x, &mut operand, workspace)?;
            }
            forward(&x_fp8, &w_fp8, y, workspace)?;
            backward_input(&dy_fp8, &w_fp8, dx, workspace)?;
            backward_weight(&dy_fp8, &x_fp8, dw, WriteMode::Accumulate, workspace)
        })
    }

    fn case(inputs: &Inputs, operation: &str, [n, i, o]: [usize; 3]) -> Case {
        Case::new(inputs.name(operation), format!("{n} x {i} -> {o}")).flops(2 * n * i * o)
    }

    /// [`forward`].
    pub fn output(inputs: &mut Inputs, sizes @ [n, i, o]: [usize; 3]) -> Case {
        case(inputs, "linear::forward", sizes)
            .input("x", &[n, i], inputs.numbers(&[n, i]))
            .input("w", &[o, i], inputs.numbers(&[o, i]))
            .output("y", &[n, o], inputs.dtype, inputs.bound())
            .workspace(move |device| workspace_elements(n, i, o, device))
            .call(|[x, w, y, workspace]| forward(x, w, y, workspace))
    }

    /// [`backward_input`].
    pub fn input_gradient(inputs: &mut Inputs, sizes @ [n, i, o]: [usize; 3]) -> Case {
        case(inputs, "linear::backward_input", sizes)
            .input("dy", &[n, o], inputs.numbers(&[n, o]))
            .input("w", &[o, i], inputs.numbers(&[o, i]))
            .output("dx", &[n, i], inputs.dtype, inputs.bound())
            .workspace(move |device| workspace_elements(n, i, o, device))
            .call(|[dy, w, dx, workspace]| backward_input(dy, w, dx, workspace))
    }

    /// [`backward_weight`].
    pub fn weight_gradient(inputs: &mut Inputs, [n, i, o]: [usize; 3], write_mode: WriteMode) -> Case {
        let sizes = format!("{n} x {i} -> {o}{}", cases::mode(write_mode));
        let case = Case::new(inputs.name("linear::backward_weight"), sizes)
            .flops(2 * n * i * o)
            .input("dy", &[n, o], inputs.numbers(&[n, o]))
            .input("x", &[n, i], inputs.numbers(&[n, i]));
        let case = match write_mode {
            WriteMode::Overwrite => case.output("dw", &[o, i], DType::F32, F32_SUM),
            WriteMode::Accumulate => case.updated("dw", &[o, i], inputs.f32(&[o, i]), F32_SUM),
        };
        case.workspace(move |device| workspace_elements(n, i, o, device))
            .call(move |[dy, x, dw, workspace]| backward_weight(dy, x, dw, write_mode, workspace))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};
    use proptest::prelude::*;

    use super::*;
    use crate::Error;
    use crate::testing::*;

    /// y, dx, dw of one linear map, dw once more added to what `start` holds.
    fn all(x: &[f64], w: &[f64], dy: &[f64], start: &[f64], [n, i, o]: [usize; 3], dtype: DType) -> [Buffer; 4] {
        let (x, w, dy) = (buffer(x, &[n, i], dtype), buffer(w, &[o, i], dtype), buffer(dy, &[n, o], dtype));
        let (mut y, mut dx) = (zeros(&[n, o], dtype), zeros(&[n, i], dtype));
        let [mut dw, mut total] = [start, start].map(|start| buffer(start, &[o, i], DType::F32));
        let mut space = workspace(workspace_elements(n, i, o, DeviceKind::Cpu));
        forward(&x, &w, &mut y, &mut space).unwrap();
        backward_input(&dy, &w, &mut dx, &mut space).unwrap();
        backward_weight(&dy, &x, &mut dw, WriteMode::Overwrite, &mut space).unwrap();
        backward_weight(&dy, &x, &mut total, WriteMode::Accumulate, &mut space).unwrap();
        [y, dx, dw, total]
    }

    fn inputs([n, i, o]: [usize; 3]) -> [Vec<f64>; 4] {
        [numbers(1, n * i), numbers(2, o * i), numbers(3, n * o), numbers(4, o * i)]
    }

    fn matches_reference(sizes: [usize; 3], dtype: DType) {
        let [x, w, dy, start] = inputs(sizes);
        let [y, dx, dw, total] = all(&x, &w, &dy, &start, sizes, dtype);
        assert_near(&y, &reference::forward(&x, &w, sizes));
        assert_near(&dx, &reference::backward_input(&dy, &w, sizes));
        let gradient = reference::backward_weight(&dy, &x, sizes);
        assert_near(&dw, &gradient);
        assert_near(&total, &start.iter().zip(&gradient).map(|(a, b)| a + b).collect::<Vec<_>>());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_shape_matches_the_reference(n in 1usize..40, i in 1usize..70, o in 1usize..70) {
            matches_reference([n, i, o], DType::F32);
            matches_reference([n, i, o], DType::BF16);
        }
    }

    #[test]
    fn bf16_operands_larger_than_a_block_match_the_reference() {
        for sizes in [[3, 1030, 517], [515, 5, 1027], [1025, 515, 2]] {
            matches_reference(sizes, DType::BF16);
        }
    }

    #[test]
    fn f32_outputs_of_bf16_operands_are_not_rounded() {
        for sizes @ [n, i, o] in [[1, 517, 75], [37, 1030, 24]] {
            let [x, w, ..] = inputs(sizes);
            let (x_NI, w_OI) = (buffer(&x, &[n, i], DType::BF16), buffer(&w, &[o, i], DType::BF16));
            let mut y_NO = zeros(&[n, o], DType::F32);
            forward(&x_NI, &w_OI, &mut y_NO, &mut workspace(workspace_elements(n, i, o, DeviceKind::Cpu))).unwrap();
            assert_near(&y_NO, &reference::forward(&x, &w, sizes));
        }
    }

    #[test]
    fn f32_matches_pytorch() {
        let golden = Golden::load("linear");
        let ([n, i], o) = ([golden.shape("x_NI")[0], golden.shape("x_NI")[1]], golden.shape("w_OI")[0]);
        let [x, w, dy, start] = ["x_NI", "w_OI", "dy_NO", "dw_start_OI"].map(|name| golden.values(name));
        let [y, dx, _, total] = all(&x, &w, &dy, &start, [n, i, o], DType::F32);
        for (result, name) in [(y, "y_NO"), (dx, "dx_NI"), (total, "dw_total_OI")] {
            assert_near(&result, &golden.values(name));
        }
    }

    #[test]
    fn f32_matches_candle_autograd() {
        let sizes @ [n, i, o] = [37, 24, 31];
        let [x, w, dy, _] = inputs(sizes);
        let leaf = |values: &[f64], shape: [usize; 2]| {
            Var::from_tensor(&Tensor::from_vec(values.to_vec(), &shape, &Device::Cpu).unwrap()).unwrap()
        };
        let (x_leaf, w_leaf) = (leaf(&x, [n, i]), leaf(&w, [o, i]));
        let dy_tensor = Tensor::from_vec(dy.clone(), &[n, o], &Device::Cpu).unwrap();
        let y_tensor = x_leaf.matmul(&w_leaf.t().unwrap()).unwrap();
        let gradients = (&y_tensor * dy_tensor).unwrap().sum_all().unwrap().backward().unwrap();
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();

        let [y, dx, dw, _] = all(&x, &w, &dy, &vec![f64::NAN; o * i], sizes, DType::F32);
        assert_near(&y, &values(&y_tensor));
        assert_near(&dx, &values(gradients.get(&x_leaf).unwrap()));
        assert_near(&dw, &values(gradients.get(&w_leaf).unwrap()));
    }

    #[test]
    fn the_references_gradients_are_the_slopes_of_its_forward() {
        let sizes = [4, 5, 3];
        let [x, w, dy, _] = inputs(sizes);
        let through_x = finite_differences(|x| dot(&reference::forward(x, &w, sizes), &dy), &x);
        assert_same_gradient(&reference::backward_input(&dy, &w, sizes), &through_x);
        let through_w = finite_differences(|w| dot(&reference::forward(&x, w, sizes), &dy), &w);
        assert_same_gradient(&reference::backward_weight(&dy, &x, sizes), &through_w);
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for sizes in [[256, 192, 320], [129, 517, 75], [1, 700, 900], [600, 1100, 530], [2000, 33, 1]] {
            let [x, w, dy, start] = inputs(sizes);
            for dtype in [DType::F32, DType::BF16] {
                assert_same_at_any_thread_count(|| all(&x, &w, &dy, &start, sizes, dtype).to_vec());
            }
        }
    }

    #[test]
    fn no_token_adds_nothing_to_the_gradient() {
        for dtype in [DType::F32, DType::BF16] {
            let start = numbers(1, 6);
            let [_, _, dw, total] = all(&[], &numbers(2, 6), &[], &start, [0, 3, 2], dtype);
            assert_eq!(dw.read::<f32>().unwrap(), [0.0; 6]);
            assert_eq!(total.read::<f32>().unwrap(), to_f32(&start));
        }
    }

    #[test]
    fn the_workspace_is_bounded_whatever_the_model() {
        assert!(workspace_elements(1 << 20, 1 << 16, 1 << 17, DeviceKind::Cpu) <= 5_400_000);
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let (x, w) = (zeros(&[4, 3], DType::F32), zeros(&[5, 3], DType::F32));
        let mut space = workspace(workspace_elements(4, 3, 6, DeviceKind::Cpu));
        let narrow = forward(&x, &w, &mut zeros(&[4, 6], DType::F32), &mut space).unwrap_err();
        assert_eq!(narrow.to_string(), "linear::forward: `y_NO` has shape [4, 6], expected [4, 5]");
        let mixed = forward(&x, &w, &mut zeros(&[4, 5], DType::BF16), &mut space).unwrap_err();
        assert_eq!(mixed.to_string(), "linear::forward: `y_NO` holds BF16, expected F32");
        let square = zeros(&[3, 3], DType::F32);
        let aliased = forward(&square, &w.view(0, &[3, 3]).unwrap(), &mut square.clone(), &mut space).unwrap_err();
        assert!(matches!(aliased, Error::Aliased { output: "y_NO", other: "x_NI", .. }), "{aliased}");
        let elements = workspace_elements(4, 3, 5, DeviceKind::Cpu);
        let small = forward(&x, &w, &mut zeros(&[4, 5], DType::F32), &mut workspace(elements - 1)).unwrap_err();
        assert!(matches!(small, Error::Workspace { actual, .. } if actual == elements - 1), "{small}");
        let integers = zeros(&[3, 3], DType::I32);
        let wrong = forward(&integers, &integers, &mut zeros(&[3, 3], DType::I32), &mut space).unwrap_err();
        assert!(matches!(wrong, Error::DType { argument: "x_NI", .. }), "{wrong}");
    }
}
