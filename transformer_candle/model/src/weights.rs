//! The weights of a model in memory: a flat buffer and, where adapters train beside a base in fp8, its projections' codes.

use std::collections::BTreeMap;

use kernels::fp8::{Codes, Operand, ScaleBlock, quantize};
use kernels::memory::{Arena, Category, allocate};
use kernels::{Buffer, DType, Device, DeviceKind, Element as _, bf16, cast};
use rayon::prelude::*;

use crate::layout::{Parameter, ParameterLayout};
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// The elements that share a scale in a base in fp8 where matmuls are not in fp8: the smallest block, of which every GPU
/// and CPU computes the numbers alike.
pub(crate) const BASE_BLOCK: ScaleBlock = ScaleBlock::Square32;

/// The weights of a model. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Every parameter in the layout's order, F32 or BF16; without those of `fp8`.
    pub flat: Buffer,
    /// The frozen projections, where they are held in fp8.
    pub(crate) fp8: Option<Fp8Projections>,
}

/// Projections that do not train, rounded to fp8 once: a byte and a share of a scale for each number.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Projections {
    /// The elements that share a scale.
    pub(crate) block: ScaleBlock,
    /// The codes of each, by its offset in the layout.
    pub(crate) codes: BTreeMap<usize, Codes>,
}

impl Fp8Projections {
    /// The projection at an offset in the layout, if there is one.
    pub(crate) fn weight(&self, offset: usize) -> Option<Weight> {
        self.codes.get(&offset).map(|codes| Weight::in_fp8(self.block, codes))
    }
}

impl From<Buffer> for Weights {
    fn from(flat: Buffer) -> Self {
        Self { flat, fp8: None }
    }
}

impl Weights {
    /// Takes the memory of a model's weights; `block` are the elements that share a scale in a base in fp8.
    pub fn take(layout: &ParameterLayout, dtype: DType, block: ScaleBlock, arena: &mut Arena) -> Self {
        let flat = arena.take("weights", Category::Weights, dtype, &[layout.elements()]);
        let codes: BTreeMap<usize, Codes> = layout
            .fp8_projections()
            .map(|Parameter { spec, offset }| {
                let sizes = [spec.shape[0], spec.row_elements()];
                (*offset, take_codes(&spec.name, block, sizes, arena))
            })
            .collect();
        Self { flat, fp8: (!codes.is_empty()).then_some(Fp8Projections { block, codes }) }
    }

    /// Weights that are zero.
    pub fn zeros(shape: &ModelShape, dtype: DType, device: &Device) -> Result<Self> {
        let layout = ParameterLayout::new(shape);
        allocate(device, |arena| Ok(Self::take(&layout, dtype, BASE_BLOCK, arena)))
    }
}

/// Takes the memory of the codes of a matrix of weights.
pub(crate) fn take_codes(name: &str, block: ScaleBlock, sizes: [usize; 2], arena: &mut Arena) -> Codes {
    let (dtype, scales) = block.scales(sizes);
    let mut take = |part, dtype, shape: &[usize]| arena.take(format!("{name}.{part}"), Category::Weights, dtype, shape);
    Codes { values: take("fp8", DType::U8, &sizes), scales: take("fp8_scales", dtype, &scales) }
}

/// Writes tensors into weights, each in pieces from its first number to its last.
pub(crate) struct WeightWriter<'a> {
    weights: &'a Weights,
    /// The low bits of the f32 masters of BF16 weights; frozen weights have none.
    low_bits: Option<&'a Buffer>,
    /// Room for a piece in F32.
    staging: Buffer,
    /// The projections of which a part has been written, by their offsets: they are rounded to fp8 as a whole.
    pending: BTreeMap<usize, PendingProjection>,
}

/// The numbers of a projection until all are there.
struct PendingProjection {
    values: Vec<bf16>,
    missing: usize,
}

impl<'a> WeightWriter<'a> {
    /// Writes pieces of at most this many elements.
    pub(crate) fn new(weights: &'a Weights, low_bits: Option<&'a Buffer>, largest_piece: usize) -> Result<Self> {
        let staging = Buffer::zeros(&[largest_piece], DType::F32, weights.flat.device())?;
        Ok(Self { weights, low_bits, staging, pending: BTreeMap::new() })
    }

    /// Writes numbers that are F32, from element `offset` of the layout on: as they are, or as BF16 weights and, if
    /// they train, the low bits of their masters.
    pub(crate) fn write(&mut self, offset: usize, values: &[f32]) -> Result<()> {
        if offset >= self.weights.flat.elements() {
            return self.write_frozen(offset, values.par_iter().map(|&value| bf16::narrow(value)));
        }
        let flat = &self.weights.flat;
        let mut master = self.staging.view(0, &[values.len()])?;
        master.write(values)?;
        let mut target = flat.view(offset, &[values.len()])?;
        match (self.low_bits_at(offset), flat.dtype()) {
            (_, DType::F32) => target.copy_from(&master)?,
            (Some(low_bits), _) => {
                cast::split_master(&master, &mut target, &mut low_bits.view(offset, &[values.len()])?)?;
            }
            (None, _) => cast::forward(&master, &mut target)?,
        }
        Ok(())
    }

    /// Writes numbers that are BF16, as [`WeightWriter::write`] does; false where it has to be called instead.
    pub(crate) fn write_bf16(&mut self, offset: usize, values: &[bf16]) -> Result<bool> {
        let flat = &self.weights.flat;
        if offset >= flat.elements() {
            return self.write_frozen(offset, values.par_iter().copied()).map(|()| true);
        }
        let is_copied = flat.dtype() == DType::BF16 && self.low_bits_at(offset).is_none();
        if is_copied {
            flat.view(offset, &[values.len()])?.write(values)?;
        }
        Ok(is_copied)
    }

    fn low_bits_at(&self, offset: usize) -> Option<&'a Buffer> {
        self.low_bits.filter(|low_bits| offset < low_bits.elements())
    }

    /// Keeps a part of a projection that is held in fp8, and rounds it when it is complete.
    fn write_frozen(&mut self, offset: usize, values: impl IndexedParallelIterator<Item = bf16>) -> Result<()> {
        let Some(fp8) = &self.weights.fp8 else { return Ok(()) };
        let Some((&first, codes)) = fp8.codes.range(..=offset).next_back() else { return Ok(()) };
        let elements = codes.values.elements();
        let pending = self
            .pending
            .entry(first)
            .or_insert_with(|| PendingProjection { values: vec![bf16::default(); elements], missing: elements });
        pending.missing -= values.len();
        pending.values[offset - first..].par_iter_mut().zip(values).for_each(|(place, value)| *place = value);
        if pending.missing > 0 {
            return Ok(());
        }
        let complete = self.pending.remove(&first).map_or_else(Vec::new, |pending| pending.values);
        round(&complete, fp8.block, codes)
    }
}

/// Rounds a projection on the CPU, whose codes are a GPU's, and copies the codes to where they are held.
fn round(values: &[bf16], block: ScaleBlock, codes: &Codes) -> Result<()> {
    let sizes = codes.values.sizes::<2>();
    let mut numbers = Buffer::zeros(&sizes, DType::BF16, &Device::Cpu)?;
    numbers.write(values)?;
    let mut workspace = Buffer::zeros(&[0], DType::F32, &Device::Cpu)?;
    let on_cpu = codes.values.device().kind() == DeviceKind::Cpu;
    let rounded = if on_cpu { codes.clone() } else { zero_codes(block, sizes)? };
    let mut operand = Operand { block, codes_RC: Some(rounded.clone()), codes_CR: None };
    quantize(&numbers, &mut operand, &mut workspace)?;
    if on_cpu {
        return Ok(());
    }
    let Codes { mut values, mut scales } = codes.clone();
    values.write(&rounded.values.read::<u8>()?)?;
    match scales.dtype() {
        DType::F32 => scales.write(&rounded.scales.read::<f32>()?)?,
        _ => scales.write(&rounded.scales.read::<u8>()?)?,
    }
    Ok(())
}

fn zero_codes(block: ScaleBlock, sizes: [usize; 2]) -> Result<Codes> {
    let (dtype, scales) = block.scales(sizes);
    let zeros = |shape: &[usize], dtype| Buffer::zeros(shape, dtype, &Device::Cpu);
    Ok(Codes { values: zeros(&sizes, DType::U8)?, scales: zeros(&scales, dtype)? })
}
