use std::collections::HashMap;

use kernels::Device;
use safetensors::tensor::TensorView;

use super::*;

/// Longer than a piece, and no multiple of one.
const LONG: usize = 2 * CPU_PIECE + 3;

fn flat(dtype: DType, seed: u32) -> Buffer {
    let mut buffer = Buffer::zeros(&[LONG + 20], dtype, &Device::Cpu).unwrap();
    let numbers = (0..LONG as u32 + 20).map(|index| (index ^ seed).wrapping_mul(0x9e37_79b9));
    match dtype {
        DType::F32 => buffer.write(&numbers.map(|n| n as f32 * 1e-7 - 200.0).collect::<Vec<_>>()),
        DType::BF16 => buffer.write(&numbers.map(|n| bf16::narrow(n as f32 * 1e-7)).collect::<Vec<_>>()),
        DType::I16 => buffer.write(&numbers.map(|n| (n >> 16) as i16).collect::<Vec<_>>()),
        _ => buffer.write(&numbers.collect::<Vec<_>>()),
    }
    .unwrap();
    buffer
}

fn range<'a>(name: &str, shape: &[usize], buffer: &'a Buffer, offset: usize) -> NamedRange<'a> {
    NamedRange { name: name.to_owned(), shape: shape.to_vec(), buffer, offset }
}

fn five([floats, halves, integers]: [&Buffer; 3]) -> Vec<NamedRange<'_>> {
    vec![
        range("z", &[LONG], integers, 2),
        range("b", &[3, 5], halves, 4),
        range("a", &[LONG], halves, 20),
        range("y", &[2], floats, 18),
        range("x", &[LONG, 1], floats, 20),
    ]
}

fn file_bytes(ranges: Vec<NamedRange>) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes, Path::new("here.safetensors"), ranges).unwrap();
    bytes
}

fn fill(mut bytes: &[u8], ranges: Vec<NamedRange>, conversion: Conversion) -> Result<()> {
    let length = bytes.len() as u64;
    read(&mut bytes, length, Path::new("here.safetensors"), ranges, conversion)
}

fn numbers(buffer: &Buffer) -> Vec<u32> {
    match buffer.dtype() {
        DType::I16 => buffer.read::<i16>().unwrap().into_iter().map(|number| number as u32).collect(),
        _ => buffer.read_f32().unwrap().into_iter().map(f32::to_bits).collect(),
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::I16];

#[test]
fn every_bit_comes_back_and_nothing_beside_the_ranges_changes() {
    let (stored, target) = (DTYPES.map(|dtype| flat(dtype, 1)), DTYPES.map(|dtype| flat(dtype, 2)));
    let numbers_before: Vec<_> = target.iter().map(numbers).collect();
    fill(&file_bytes(five(stored.each_ref())), five(target.each_ref()), Conversion::Refused).unwrap();
    for (index, buffer) in target.iter().enumerate() {
        let ranges: Vec<_> = five(target.each_ref())
            .iter()
            .filter(|range| std::ptr::eq(range.buffer, buffer))
            .map(|range| range.offset..range.offset + range.elements())
            .collect();
        let stored = numbers(&stored[index]);
        for (place, number) in numbers(buffer).into_iter().enumerate() {
            let inside = ranges.iter().any(|range| range.contains(&place));
            let expected = if inside { stored[place] } else { numbers_before[index][place] };
            assert_eq!(number, expected, "{:?} at {place}", DTYPES[index]);
        }
    }
}

#[test]
fn the_bytes_are_those_of_the_format_s_own_writer() {
    let buffers = DTYPES.map(|dtype| flat(dtype, 1));
    let ranges = five(buffers.each_ref());
    let owned: Vec<_> = ranges
        .iter()
        .map(|range| {
            let part = range.buffer.view(range.offset, &range.shape).unwrap();
            let bytes: Vec<u8> = match part.dtype() {
                DType::F32 => part.read::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
                DType::BF16 => part.read::<bf16>().unwrap().into_iter().flat_map(bf16::to_le_bytes).collect(),
                _ => part.read::<i16>().unwrap().into_iter().flat_map(i16::to_le_bytes).collect(),
            };
            (range.name.clone(), range.dtype().unwrap(), range.shape.clone(), bytes)
        })
        .collect();
    let views =
        owned.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    assert!(file_bytes(ranges) == safetensors::serialize(views, Some(format)).unwrap());
}

fn one(buffer: &Buffer) -> Vec<NamedRange<'_>> {
    vec![range("one", &[LONG], buffer, 7)]
}

#[test]
fn floats_are_converted_only_where_that_is_asked_for() {
    let [floats, halves, integers] = DTYPES.map(|dtype| flat(dtype, 1));
    for (stored, target) in [(&floats, flat(DType::BF16, 2)), (&halves, flat(DType::F32, 2))] {
        let (file, numbers_before) = (file_bytes(one(stored)), numbers(&target));
        let refusal = fill(&file, one(&target), Conversion::Refused).unwrap_err().to_string();
        let only = format!("tensor `one` holds {:?}; only {:?} can be read", stored.dtype(), target.dtype());
        assert!(refusal.contains("here.safetensors") && refusal.contains(&only), "{refusal}");
        assert_eq!(numbers(&target), numbers_before, "what is refused changes nothing");
        fill(&file, one(&target), Conversion::BetweenFloats).unwrap();
        let part = |buffer: &Buffer| buffer.view(7, &[LONG]).unwrap().read_f32().unwrap();
        let rounded = part(stored).into_iter().map(|value| bf16::from_f32(value).to_f32());
        assert_eq!(part(&target), rounded.collect::<Vec<_>>());
    }
    for (stored, target) in [(&integers, &floats), (&halves, &integers), (&floats, &integers)] {
        let refusal = fill(&file_bytes(one(stored)), one(target), Conversion::BetweenFloats).unwrap_err();
        assert!(matches!(&refusal, Error::Tensor { name, .. } if name == "one"), "{refusal}");
    }
}

#[test]
fn other_tensors_are_refused_by_name_and_change_nothing() {
    let (stored, target) = (flat(DType::F32, 1), flat(DType::F32, 2));
    let numbers_before = numbers(&target);
    let file = file_bytes(vec![range("a", &[6, 2], &stored, 0), range("b", &[3], &stored, 12)]);
    let a = || range("a", &[6, 2], &target, 0);
    let b = || range("b", &[3], &target, 12);
    for (ranges, name, problem) in [
        (vec![a()], "`b`", "is in the file, but not in the model"),
        (vec![a(), b(), range("c", &[1], &target, 15)], "`c`", "is missing"),
        (vec![range("a", &[2, 6], &target, 0), b()], "`a`", "has shape [6, 2], the model's has [2, 6]"),
    ] {
        let refusal = fill(&file, ranges, Conversion::Refused).unwrap_err().to_string();
        assert!(refusal.starts_with("here.safetensors: tensor"), "{refusal}");
        assert!(refusal.contains(name) && refusal.contains(problem), "{refusal}");
    }
    assert_eq!(numbers(&target), numbers_before);
}

#[test]
fn a_header_that_lies_is_refused_before_memory_is_taken_for_it() {
    let buffer = flat(DType::F32, 1);
    let ranges = || vec![range("a", &[6], &buffer, 0)];
    let valid = file_bytes(ranges());
    let claiming = |length: u64| [length.to_le_bytes().as_slice(), &valid[8..]].concat();
    let describing = |json: &str| [(json.len() as u64).to_le_bytes().as_slice(), json.as_bytes()].concat();
    // Each tensor's size is one that an address space has; their sum is the largest number there is.
    let third = u64::MAX / 5 / 3;
    let endless: Vec<_> = (0..15)
        .map(|index| {
            let (start, end) = (index * third, (index + 1) * third);
            format!(r#""{index}": {{"dtype": "U8", "shape": [{third}], "data_offsets": [{start}, {end}]}}"#)
        })
        .collect();
    for (what, file) in [
        ("no bytes", Vec::new()),
        ("a cut length", valid[..7].to_vec()),
        ("a length alone", valid[..8].to_vec()),
        ("a header longer than the file", claiming(valid.len() as u64 - 7)),
        ("the longest header", claiming(u64::MAX)),
        ("a cut tensor", valid[..valid.len() - 1].to_vec()),
        ("a byte too many", [valid.as_slice(), b" "].concat()),
        ("no header", claiming(0)),
        ("no JSON", describing("model")),
        ("tensors without end", describing(&format!("{{{}}}", endless.join(",")))),
    ] {
        let refusal = fill(&file, ranges(), Conversion::Refused).unwrap_err();
        assert!(matches!(refusal, Error::Malformed { .. }), "{what}: {refusal}");
        assert!(refusal.to_string().starts_with("here.safetensors is not a valid"), "{what}: {refusal}");
    }
}

#[test]
fn a_buffer_of_another_type_is_refused() {
    let buffer = flat(DType::U32, 1);
    let ranges = || vec![range("a", &[6], &buffer, 0)];
    let file = file_bytes(vec![range("a", &[6], &flat(DType::F32, 1), 0)]);
    let path = Path::new("here.safetensors");
    for refusal in [write(&mut Vec::new(), path, ranges()), fill(&file, ranges(), Conversion::BetweenFloats)] {
        assert!(matches!(refusal, Err(Error::Kernel(kernels::Error::DType { .. }))), "{refusal:?}");
    }
}
