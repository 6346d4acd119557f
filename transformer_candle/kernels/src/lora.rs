//! Low-rank adapters (Hu et al., "`LoRA`", arXiv:2106.09685): the update `y += s (x A^T) B^T` of a linear map's
//! outputs, and its gradients, each one GEMM.
//!
//! Legend: N tokens, I inputs, R rank, O outputs of the adapted module, P width of a row of outputs, of which the
//! module's are the O columns from `first_column` on: the projections of several modules lie side by side. With
//! `z = s x A^T`, which [`project`] computes and [`expand`] adds to y, and dz the gradient of x A^T:
//! ```text
//! dz = s dy B      dB = dy^T z      dA = dz^T x      dx += dz A
//! ```
//! dA is [`crate::linear::backward_weight`] of `dz` and `x`. All values are of one element type, F32 or BF16; gradients
//! of A and B are F32.

use candle_core::DType;

use crate::element::result_dtype;
use crate::matmul::{Columns, Gemm, View};
use crate::{Buffer, DeviceKind, Result, WriteMode, linear};

/// `z_NR = scale x_NI a_RI^T`.
pub fn project(x_NI: &Buffer, a_RI: &Buffer, scale: f32, z_NR: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
    let gemm = Gemm::new("lora::project", View::of("x_NI", x_NI), View::of("a_RI", a_RI).transposed());
    Gemm { scale, ..gemm }.write_to("z_NR", z_NR, None, workspace)
}

/// `y_NP[:, columns] += z_NR b_OR^T`. `y_NP` may be F32 beside BF16 operands.
pub fn expand(
    z_NR: &Buffer,
    b_OR: &Buffer,
    y_NP: &mut Buffer,
    first_column: usize,
    workspace: &mut Buffer,
) -> Result<()> {
    let gemm = Gemm::new("lora::expand", View::of("z_NR", z_NR), View::of("b_OR", b_OR).transposed());
    let (dtype, columns) = (result_dtype(y_NP.dtype(), gemm.dtype), outputs(b_OR, first_column));
    let gemm = Gemm { dtype, write_mode: WriteMode::Accumulate, ..gemm };
    gemm.write_to("y_NP", y_NP, Some(columns), workspace)
}

/// `dz_NR = scale dy_NP[:, columns] b_OR`.
pub fn backward_expand(
    dy_NP: &Buffer,
    first_column: usize,
    b_OR: &Buffer,
    scale: f32,
    dz_NR: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let dy = View::of("dy_NP", dy_NP).columns(outputs(b_OR, first_column));
    let gemm = Gemm::new("lora::backward_expand", dy, View::of("b_OR", b_OR));
    Gemm { scale, ..gemm }.write_to("dz_NR", dz_NR, None, workspace)
}

/// `db_OR = dy_NP[:, columns]^T z_NR` or `db_OR += dy_NP[:, columns]^T z_NR` in F32.
pub fn backward_b(
    dy_NP: &Buffer,
    first_column: usize,
    z_NR: &Buffer,
    db_OR: &mut Buffer,
    write_mode: WriteMode,
    workspace: &mut Buffer,
) -> Result<()> {
    let dy = View::of("dy_NP", dy_NP).columns(outputs(db_OR, first_column)).transposed();
    let gemm = Gemm::new("lora::backward_b", dy, View::of("z_NR", z_NR));
    Gemm { dtype: DType::F32, write_mode, ..gemm }.write_to("db_OR", db_OR, None, workspace)
}

/// `dx_NI += dz_NR a_RI`.
pub fn backward_input(dz_NR: &Buffer, a_RI: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
    let gemm = Gemm::new("lora::backward_input", View::of("dz_NR", dz_NR), View::of("a_RI", a_RI));
    Gemm { write_mode: WriteMode::Accumulate, ..gemm }.write_to("dx_NI", dx_NI, None, workspace)
}

/// The columns of the outputs of the module that B belongs to.
fn outputs(b_OR: &Buffer, first: usize) -> Columns {
    Columns { first, count: b_OR.size(0) }
}

/// Elements of F32 workspace for all functions of a module of I inputs and O outputs, and for the gradient of A.
pub fn workspace_elements(n: usize, inputs: usize, rank: usize, outputs: usize, device: DeviceKind) -> usize {
    linear::workspace_elements(n, inputs, rank, device).max(linear::workspace_elements(n, rank, outputs, device))
}

/// The operation in the plainest terms.
pub mod reference {
    use crate::Real;
    use crate::linear::reference as linear;

    /// Returns the update of a module's outputs, `scale (x_NI a_RI^T) b_OR^T`; sizes are [N, I, R, O].
    pub fn forward<R: Real>(x_NI: &[R], a_RI: &[R], b_OR: &[R], scale: R, [n, i, r, o]: [usize; 4]) -> Vec<R> {
        let z_NR: Vec<R> = linear::forward(x_NI, a_RI, [n, i, r]).into_iter().map(|z| scale * z).collect();
        linear::forward(&z_NR, b_OR, [n, r, o])
    }
}

/// Calls for checks and benchmarks.
pub mod cases {
    use super::{backward_b, backward_expand, backward_input, expand, project, workspace_elements};
    use crate::cases::bounds::F32_SUM;
    use crate::cases::{Case, CaseList, Inputs, Size};
    use crate::{DType, WriteMode};

    /// Sizes of an adapter of a module whose outputs are columns of wider rows.
    #[derive(Clone, Copy)]
    pub struct Sizes {
        /// Tokens.
        pub n: usize,
        /// Inputs of the module.
        pub inputs: usize,
        /// The adapter's rank.
        pub rank: usize,
        /// Outputs of the module.
        pub outputs: usize,
        /// The module's first column.
        pub first: usize,
        /// Width of a row.
        pub width: usize,
    }

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        let sizes = match size {
            Size::Small => Sizes { n: 5, inputs: 64, rank: 8, outputs: 32, first: 16, width: 64 },
            Size::Medium => Sizes { n: 300, inputs: 96, rank: 16, outputs: 96, first: 64, width: 192 },
            Size::Full => Sizes { n: 2048, inputs: 2048, rank: 16, outputs: 512, first: 2048, width: 3072 },
        };
        for make in [projection, expansion, gradient_of_projection, gradient_of_b, gradient_of_input] {
            cases.add(move |inputs| make(inputs, sizes));
        }
    }

    const SCALE: f32 = 0.5;

    /// The case of a GEMM of the adapter.
    fn case(inputs: &Inputs, operation: &str, sizes: Sizes, flops: usize) -> Case {
        let Sizes { n, inputs: i, rank, outputs: o, .. } = sizes;
        Case::new(inputs.name(operation), format!("{n} x {i} -> {rank} -> {o}")).flops(flops)
    }

    fn workspace(case: Case, Sizes { n, inputs, rank, outputs, .. }: Sizes) -> Case {
        case.workspace(move |device| workspace_elements(n, inputs, rank, outputs, device))
    }

    /// [`project`].
    pub fn projection(inputs: &mut Inputs, sizes: Sizes) -> Case {
        let Sizes { n, inputs: i, rank, .. } = sizes;
        let case = case(inputs, "lora::project", sizes, 2 * n * i * rank)
            .input("x", &[n, i], inputs.numbers(&[n, i]))
            .input("a", &[rank, i], inputs.numbers(&[rank, i]))
            .output("z", &[n, rank], inputs.dtype, inputs.bound());
        workspace(case, sizes).call(|[x, a, z, workspace]| project(x, a, SCALE, z, workspace))
    }

    /// [`expand`].
    pub fn expansion(inputs: &mut Inputs, sizes: Sizes) -> Case {
        let Sizes { n, rank, outputs: o, first, width, .. } = sizes;
        let case = case(inputs, "lora::expand", sizes, 2 * n * rank * o)
            .input("z", &[n, rank], inputs.numbers(&[n, rank]))
            .input("b", &[o, rank], inputs.numbers(&[o, rank]))
            .updated("y", &[n, width], inputs.numbers(&[n, width]), inputs.bound());
        workspace(case, sizes).call(move |[z, b, y, workspace]| expand(z, b, y, first, workspace))
    }

    /// [`backward_expand`].
    pub fn gradient_of_projection(inputs: &mut Inputs, sizes: Sizes) -> Case {
        let Sizes { n, rank, outputs: o, first, width, .. } = sizes;
        let case = case(inputs, "lora::backward_expand", sizes, 2 * n * rank * o)
            .input("dy", &[n, width], inputs.numbers(&[n, width]))
            .input("b", &[o, rank], inputs.numbers(&[o, rank]))
            .output("dz", &[n, rank], inputs.dtype, inputs.bound());
        workspace(case, sizes).call(move |[dy, b, dz, workspace]| backward_expand(dy, first, b, SCALE, dz, workspace))
    }

    /// [`backward_b`].
    pub fn gradient_of_b(inputs: &mut Inputs, sizes: Sizes) -> Case {
        let Sizes { n, rank, outputs: o, first, width, .. } = sizes;
        let case = case(inputs, "lora::backward_b", sizes, 2 * n * rank * o)
            .input("dy", &[n, width], inputs.numbers(&[n, width]))
            .input("z", &[n, rank], inputs.numbers(&[n, rank]))
            .updated("db", &[o, rank], inputs.f32(&[o, rank]), F32_SUM);
        workspace(case, sizes)
            .call(move |[dy, z, db, workspace]| backward_b(dy, first, z, db, WriteMode::Accumulate, workspace))
    }

    /// [`backward_input`].
    pub fn gradient_of_input(inputs: &mut Inputs, sizes: Sizes) -> Case {
        let Sizes { n, inputs: i, rank, .. } = sizes;
        let case = case(inputs, "lora::backward_input", sizes, 2 * n * i * rank)
            .input("dz", &[n, rank], inputs.numbers(&[n, rank]))
            .input("a", &[rank, i], inputs.numbers(&[rank, i]))
            .updated("dx", &[n, i], inputs.numbers(&[n, i]), inputs.bound());
        workspace(case, sizes).call(|[dz, a, dx, workspace]| backward_input(dz, a, dx, workspace))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};

    use super::*;
    use crate::testing::*;

    /// N, I, R, O, P and the first column.
    type Sizes = [usize; 6];

    struct Inputs {
        x: Vec<f64>,
        a: Vec<f64>,
        b: Vec<f64>,
        y: Vec<f64>,
        dy: Vec<f64>,
        dx: Vec<f64>,
        db: Vec<f64>,
    }

    impl Inputs {
        fn new([n, i, r, o, p, _]: Sizes) -> Self {
            let [x, a, b, y, dy, dx, db] = [n * i, r * i, o * r, n * p, n * p, n * i, o * r];
            let mut seed = 0;
            let mut random = |count| {
                seed += 1;
                numbers(seed, count)
            };
            Self {
                x: random(x),
                a: random(a),
                b: random(b),
                y: random(y),
                dy: random(dy),
                dx: random(dx),
                db: random(db),
            }
        }

        /// y, dx, da, db of one adapter, each added to what was there but da.
        fn run(&self, [n, i, r, o, p, first]: Sizes, scale: f32, dtype: DType) -> [Buffer; 4] {
            let (x, a, b) =
                (buffer(&self.x, &[n, i], dtype), buffer(&self.a, &[r, i], dtype), buffer(&self.b, &[o, r], dtype));
            let (mut y, dy, mut dx) =
                (buffer(&self.y, &[n, p], dtype), buffer(&self.dy, &[n, p], dtype), buffer(&self.dx, &[n, i], dtype));
            let (mut z, mut dz) = (zeros(&[n, r], dtype), zeros(&[n, r], dtype));
            let (mut da, mut db) = (zeros(&[r, i], DType::F32), buffer(&self.db, &[o, r], DType::F32));
            let mut space = workspace(workspace_elements(n, i, r, o, DeviceKind::Cpu));
            project(&x, &a, scale, &mut z, &mut space).unwrap();
            expand(&z, &b, &mut y, first, &mut space).unwrap();
            backward_expand(&dy, first, &b, scale, &mut dz, &mut space).unwrap();
            backward_b(&dy, first, &z, &mut db, WriteMode::Accumulate, &mut space).unwrap();
            linear::backward_weight(&dz, &x, &mut da, WriteMode::Overwrite, &mut space).unwrap();
            backward_input(&dz, &a, &mut dx, &mut space).unwrap();
            [y, dx, da, db]
        }
    }

    #[test]
    fn values_and_gradients_match_candle_autograd() {
        for sizes @ [n, i, r, o, p, first] in [[37, 24, 4, 31, 50, 7], [1, 8, 2, 8, 8, 0], [130, 70, 16, 40, 64, 24]] {
            let inputs = Inputs::new(sizes);
            let leaf = |values: &[f64], shape: [usize; 2]| {
                Var::from_tensor(&Tensor::from_vec(values.to_vec(), &shape, &Device::Cpu).unwrap()).unwrap()
            };
            let [x, a, b] = [leaf(&inputs.x, [n, i]), leaf(&inputs.a, [r, i]), leaf(&inputs.b, [o, r])];
            let dy = Tensor::from_vec(inputs.dy.clone(), &[n, p], &Device::Cpu).unwrap();
            let dy = dy.narrow(1, first, o).unwrap();
            let scale = 1.75;
            let added = x.matmul(&a.t().unwrap()).unwrap().matmul(&b.t().unwrap()).unwrap();
            let added = (added * scale).unwrap();
            let gradients = (&added * dy).unwrap().sum_all().unwrap().backward().unwrap();
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            let plus = |start: &[f64], added: Vec<f64>| start.iter().zip(added).map(|(a, b)| a + b).collect::<Vec<_>>();
            let added = values(&added);
            assert_near(
                &buffer(&added, &[n, o], DType::F32),
                &reference::forward(&inputs.x, &inputs.a, &inputs.b, scale, [n, i, r, o]),
            );
            let mut expected = inputs.y.clone();
            for (row, added) in expected.chunks_mut(p).zip(added.chunks(o)) {
                row[first..][..o].iter_mut().zip(added).for_each(|(y, added)| *y += added);
            }
            for dtype in [DType::F32, DType::BF16] {
                let [y, dx, da, db] = inputs.run(sizes, scale as f32, dtype);
                // In BF16 z and dz are rounded on the way.
                let bound = if dtype == DType::BF16 { 8e-3 } else { 1e-6 };
                assert_within(&y, &expected, bound);
                assert_within(&dx, &plus(&inputs.dx, values(gradients.get(&x).unwrap())), bound);
                assert_within(&da, &values(gradients.get(&a).unwrap()), bound);
                assert_within(&db, &plus(&inputs.db, values(gradients.get(&b).unwrap())), bound);
            }
        }
    }

    #[test]
    fn columns_of_other_modules_keep_every_bit() {
        let sizes @ [n, _, _, o, p, first] = [33, 24, 4, 10, 40, 9];
        let inputs = Inputs::new(sizes);
        let [y, ..] = inputs.run(sizes, 2.0, DType::F32);
        let after = y.read::<f32>().unwrap();
        for (at, (&after, &before)) in after.iter().zip(&inputs.y).enumerate() {
            let is_own = (first..first + o).contains(&(at % p));
            assert_eq!(after != before as f32, is_own, "{at} of {n} rows of {p}");
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for sizes in [[256, 192, 16, 320, 512, 64], [600, 1100, 8, 530, 530, 0]] {
            let inputs = Inputs::new(sizes);
            for dtype in [DType::F32, DType::BF16] {
                assert_same_at_any_thread_count(|| inputs.run(sizes, 1.5, dtype).to_vec());
            }
        }
    }

    #[test]
    fn columns_outside_of_the_rows_are_refused() {
        let (z, b, mut y) = (zeros(&[3, 2], DType::F32), zeros(&[4, 2], DType::F32), zeros(&[3, 6], DType::F32));
        let mut space = workspace(workspace_elements(3, 2, 2, 4, DeviceKind::Cpu));
        let error = expand(&z, &b, &mut y, 3, &mut space).unwrap_err();
        assert!(error.to_string().contains("4 columns from 3 on are not within rows of 6"), "{error}");
        expand(&z, &b, &mut y, 2, &mut space).unwrap();
    }
}
