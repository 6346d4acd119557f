//! The weights of a model in memory: a flat buffer and, where adapters train beside a base in fp8, its projections' codes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

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

/// A projection in BF16 on the CPU, until all of its numbers are there.
struct PendingProjection {
    values_OI: Buffer,
    missing: usize,
}

impl<'a> WeightWriter<'a> {
    /// Writes pieces of at most this many elements.
    pub(crate) fn new(weights: &'a Weights, low_bits: Option<&'a Buffer>, largest_piece: usize) -> Result<Self> {
        let staging = Buffer::zeros(&[largest_piece], DType::F32, weights.flat.device())?;
        Ok(Self { weights, low_bits, staging, pending: BTreeMap::new() })
    }

    /// Writes numbers from element `offset` of the layout on: as they are, or as BF16 weights and, if they train, the low
    /// bits of their masters.
    pub(crate) fn write(&mut self, offset: usize, values: &[f32]) -> Result<()> {
        if let Some(fp8) = self.fp8_at(offset) {
            let narrowed: Vec<bf16> = values.par_iter().map(|&value| bf16::narrow(value)).collect();
            return self.write_fp8(fp8, offset, &narrowed);
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

    /// [`WeightWriter::write`] of numbers that are BF16.
    pub(crate) fn write_bf16(&mut self, offset: usize, values: &[bf16]) -> Result<()> {
        if let Some(fp8) = self.fp8_at(offset) {
            return self.write_fp8(fp8, offset, values);
        }
        let flat = &self.weights.flat;
        if flat.dtype() == DType::BF16 && self.low_bits_at(offset).is_none() {
            return Ok(flat.view(offset, &[values.len()])?.write(values)?);
        }
        self.write(offset, &values.par_iter().map(|value| value.widen()).collect::<Vec<_>>())
    }

    fn low_bits_at(&self, offset: usize) -> Option<&'a Buffer> {
        self.low_bits.filter(|low_bits| offset < low_bits.elements())
    }

    /// The projections in fp8, if the element is one of theirs.
    fn fp8_at(&self, offset: usize) -> Option<&'a Fp8Projections> {
        self.weights.fp8.as_ref().filter(|_| offset >= self.weights.flat.elements())
    }

    /// Keeps a part of a projection, and rounds the projection when it is complete.
    fn write_fp8(&mut self, fp8: &Fp8Projections, offset: usize, values: &[bf16]) -> Result<()> {
        let projection = fp8.codes.range(..=offset).next_back();
        let (&first, codes) = projection.expect("the first projection begins where the flat buffer ends");
        let pending = match self.pending.entry(first) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(PendingProjection {
                values_OI: Buffer::zeros(codes.values.shape(), DType::BF16, &Device::Cpu)?,
                missing: codes.values.elements(),
            }),
        };
        pending.values_OI.view(offset - first, &[values.len()])?.write(values)?;
        pending.missing -= values.len();
        if pending.missing == 0 {
            round(&pending.values_OI, fp8.block, codes)?;
            self.pending.remove(&first);
        }
        Ok(())
    }
}

/// Rounds a projection on the CPU, whose codes are a GPU's, and copies the codes to where they are held.
fn round(values_OI: &Buffer, block: ScaleBlock, codes: &Codes) -> Result<()> {
    let is_on_cpu = codes.values.device().kind() == DeviceKind::Cpu;
    let rounded = if is_on_cpu { codes.clone() } else { zero_codes(block, values_OI.sizes())? };
    let mut operand = Operand { block, codes_RC: Some(rounded.clone()), codes_CR: None };
    quantize(values_OI, &mut operand, &mut Buffer::zeros(&[0], DType::F32, &Device::Cpu)?)?;
    if is_on_cpu {
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
