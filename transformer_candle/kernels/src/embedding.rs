//! Token embedding: rows of a table by id, and the sum of their gradients.
//!
//! Legend: N tokens, V rows of the table (padded vocabulary), D hidden.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::{result_dtype, with_element, with_elements};
use crate::{Buffer, DeviceKind, Error, Result, cpu};

/// `out_ND[n] = table_VD[ids_N[n]]`. Table and output are of one element type, F32 or BF16, but on a CPU the output may
/// be F32 beside a table in BF16; ids are U32.
///
/// An id that is not below V is [`Error::OutOfRange`] on the CPU. A GPU cannot say so before it is done: the token's
/// row is NaN there, which shows in the loss, and keeps the optimizer from taking the step.
pub fn forward(table_VD: &Buffer, ids_N: &Buffer, out_ND: &mut Buffer) -> Result<()> {
    let (n, [v, d]) = (ids_N.elements(), table_VD.sizes());
    let (dtype, out_dtype) = (table_VD.dtype(), result_dtype(out_ND.dtype(), table_VD.dtype()));
    let arguments = Arguments::new("embedding::forward")
        .input("table_VD", table_VD, dtype, &[v, d])
        .input("ids_N", ids_N, DType::U32, &[n])
        .output("out_ND", out_ND, out_dtype, &[n, d])
        .same_on_a_gpu("out_ND", out_ND, dtype);
    let (table, ids, out) = (table_VD.into(), ids_N.into(), KernelArg::from(&*out_ND));
    let cpu = |access: &Access<'_>| {
        let ids = checked_ids("embedding::forward", ids_N.slice(access), v)?;
        with_elements!("embedding::forward", "table_VD", [dtype, out_dtype], [E, O] => {
            cpu::embedding::forward::<E, O>(table_VD.slice(access), ids, out_ND.slice_mut(access), d);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::embedding::forward(table, ids, out, [n, v, d]))
}

/// `dtable_VD[ids_N[n]] += dout_ND[n]` in F32, for each row of the table in the order of the tokens. `dout_ND` is F32
/// or BF16.
///
/// An id that is not below V is [`Error::OutOfRange`] on the CPU; a GPU leaves its gradient out.
pub fn backward(ids_N: &Buffer, dout_ND: &Buffer, dtable_VD: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
    let (n, [v, d]) = (ids_N.elements(), dtable_VD.sizes());
    let dtype = dout_ND.dtype();
    let arguments = Arguments::new("embedding::backward")
        .input("ids_N", ids_N, DType::U32, &[n])
        .input("dout_ND", dout_ND, dtype, &[n, d])
        .output("dtable_VD", dtable_VD, DType::F32, &[v, d])
        .workspace(workspace, workspace_elements(n, dout_ND.device().kind()));
    let (ids, dout, dtable) = (ids_N.into(), dout_ND.into(), KernelArg::from(&*dtable_VD));
    let chains = cuda::embedding::chains(workspace, n);
    let cpu = |access: &Access<'_>| {
        let ids = checked_ids("embedding::backward", ids_N.slice(access), v)?;
        with_element!("embedding::backward", "dout_ND", dtype, E => {
            cpu::embedding::backward::<E>(ids, dout_ND.slice(access), dtable_VD.slice_mut(access), d);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::embedding::backward(ids, dout, dtable, chains, [n, v, d]))
}

/// Elements of F32 workspace that [`backward`] needs for this many tokens.
pub fn workspace_elements(tokens: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda => cuda::embedding::workspace_elements(tokens),
    }
}

fn checked_ids<'a>(operation: &'static str, ids: &'a [u32], limit: usize) -> Result<&'a [u32]> {
    match ids.iter().position(|&id| id as usize >= limit) {
        None => Ok(ids),
        Some(position) => {
            let value = i64::from(ids[position]);
            Err(Error::OutOfRange { operation, argument: "ids_N", position, value, limit })
        }
    }
}

/// The plain version.
pub mod reference {
    use crate::Real;

    /// The rows of `table_VD` that `ids_N` name.
    pub fn forward<R: Real>(table_VD: &[R], ids_N: &[u32], d: usize) -> Vec<R> {
        ids_N.iter().flat_map(|&id| table_VD[id as usize * d..][..d].to_vec()).collect()
    }

    /// The gradient of the table.
    pub fn backward<R: Real>(ids_N: &[u32], dout_ND: &[R], v: usize, d: usize) -> Vec<R> {
        let mut dtable_VD = vec![R::ZERO; v * d];
        for (&id, dout) in ids_N.iter().zip(dout_ND.chunks(d)) {
            for (sum, &gradient) in dtable_VD[id as usize * d..].iter_mut().zip(dout) {
                *sum += gradient;
            }
        }
        dtable_VD
    }
}

/// Calls for checks and benchmarks, of sizes [N, V, D].
pub mod cases {
    use super::{backward, forward, workspace_elements};
    use crate::DType;
    use crate::cases::bounds::{EXACT, F32};
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[11, 64, 32]],
            Size::Medium => vec![[3000, 1000, 32]],
            Size::Full => vec![[100, 128, 80], [4096, 16_384, 2048]],
        };
        for sizes in sizes {
            cases.add(move |inputs| lookup(inputs, sizes));
            cases.add(move |inputs| gradient(inputs, sizes));
        }
    }

    /// [`forward`]: N rows of the table.
    pub fn lookup(inputs: &mut Inputs, [n, v, d]: [usize; 3]) -> Case {
        Case::new(inputs.name("embedding::forward"), format!("{n} of {v} x {d}"))
            .input("table", &[v, d], inputs.numbers(&[v, d]))
            .input("ids", &[n], inputs.ids(n, v))
            .output("out", &[n, d], inputs.dtype, EXACT)
            .bytes(2 * n * d * inputs.dtype.size_in_bytes())
            .call(|[table, ids, out]| forward(table, ids, out))
    }

    /// [`backward`].
    pub fn gradient(inputs: &mut Inputs, [n, v, d]: [usize; 3]) -> Case {
        Case::new(inputs.name("embedding::backward"), format!("{n} of {v} x {d}"))
            .input("ids", &[n], inputs.ids(n, v))
            .input("dout", &[n, d], inputs.numbers(&[n, d]))
            .updated("dtable", &[v, d], inputs.f32(&[v, d]), F32)
            .workspace(move |device| workspace_elements(n, device))
            .bytes(n * d * (inputs.dtype.size_in_bytes() + 2 * DType::F32.size_in_bytes()))
            .call(|[ids, dout, dtable, workspace]| backward(ids, dout, dtable, workspace))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};
    use proptest::prelude::*;

    use super::*;
    use crate::testing::*;

    fn run(table: &[f64], ids: &[u32], dout: &[f64], [v, d]: [usize; 2], dtype: DType) -> [Buffer; 2] {
        let (n, table, ids) = (ids.len(), buffer(table, &[v, d], dtype), integers(ids));
        let (mut out, mut dtable) = (zeros(&[n, d], dtype), zeros(&[v, d], DType::F32));
        forward(&table, &ids, &mut out).unwrap();
        backward(&ids, &buffer(dout, &[n, d], dtype), &mut dtable, &mut workspace(1)).unwrap();
        [out, dtable]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_ids_match_the_reference(ids in prop::collection::vec(0u32..600, 1..300), d in 1usize..20) {
            let (table, dout) = (numbers(1, 600 * d), numbers(2, ids.len() * d));
            for dtype in [DType::F32, DType::BF16] {
                let [out, dtable] = run(&table, &ids, &dout, [600, d], dtype);
                prop_assert_eq!(out.read_f32().unwrap(), to_f32(&reference::forward(&table, &ids, d)));
                assert_within(&dtable, &reference::backward(&ids, &dout, 600, d), 1e-6);
            }
        }
    }

    #[test]
    fn f32_matches_pytorch() {
        let golden = Golden::load("embedding");
        let ids: Vec<u32> = golden.integers("ids_N").iter().map(|&id| id as u32).collect();
        let (table, dout) = (golden.values("table_VD"), golden.values("dout_ND"));
        let shape = [golden.shape("table_VD")[0], golden.shape("table_VD")[1]];
        let [out, dtable] = run(&table, &ids, &dout, shape, DType::F32);
        assert_near(&out, &golden.values("out_ND"));
        assert_near(&dtable, &golden.values("dtable_VD"));
    }

    #[test]
    fn f32_matches_candle_autograd() {
        let (ids, [v, d]) = ([3u32, 0, 3, 6, 3, 1], [7, 5]);
        let (table, dout) = (numbers(1, v * d), numbers(2, ids.len() * d));
        let leaf = Var::from_tensor(&Tensor::from_vec(table.clone(), (v, d), &Device::Cpu).unwrap()).unwrap();
        let index = Tensor::new(&ids, &Device::Cpu).unwrap();
        let weights = Tensor::from_vec(dout.clone(), (ids.len(), d), &Device::Cpu).unwrap();
        let scalar = (leaf.index_select(&index, 0).unwrap() * weights).unwrap().sum_all().unwrap();
        let gradients = scalar.backward().unwrap();
        let expected = gradients.get(&leaf).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        assert_near(&run(&table, &ids, &dout, [v, d], DType::F32)[1], &expected);
    }

    #[test]
    fn the_references_gradient_is_the_slope_of_its_forward() {
        let (ids, table, dout) = ([2u32, 0, 2], numbers(1, 4 * 3), numbers(2, 3 * 3));
        let slope = finite_differences(|table| dot(&reference::forward(table, &ids, 3), &dout), &table);
        assert_same_gradient(&reference::backward(&ids, &dout, 4, 3), &slope);
    }

    #[test]
    fn an_id_beyond_the_table_is_named_and_nothing_is_written() {
        let (ids, table) = (integers(&[1u32, 7, 2]), buffer(&numbers(1, 12), &[4, 3], DType::F32));
        let mut out = zeros(&[3, 3], DType::F32);
        let error = forward(&table, &ids, &mut out).unwrap_err();
        assert_eq!(error.to_string(), "embedding::forward: ids_N[1] = 7 is not within 0..4");
        assert_eq!(out.read::<f32>().unwrap(), [0.0; 9]);
        let mut dtable = zeros(&[4, 3], DType::F32);
        assert!(matches!(
            backward(&ids, &out, &mut dtable, &mut workspace(1)),
            Err(Error::OutOfRange { value: 7, .. })
        ));
    }

    #[test]
    fn an_output_inside_of_the_table_is_refused() {
        let table = zeros(&[4, 3], DType::F32);
        let mut out = table.view(3, &[2, 3]).unwrap();
        let error = forward(&table, &integers(&[0u32, 1]), &mut out).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "out_ND", other: "table_VD", .. }), "{error}");
    }
}
