//! Every changed byte of a checkpoint is noticed.

use super::*;

/// `number` values below `limit`, the same every time.
fn scattered(number: usize, limit: usize) -> impl Iterator<Item = usize> {
    (1..=number as u64).map(move |index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as usize % limit)
}

fn assert_corrupted(checkpoint: &Path, name: &str, what: &str) {
    match verify(checkpoint, &CancelToken::new()) {
        Err(CheckpointError::Corrupted { reason, .. }) => {
            assert!(reason.contains(name), "{what}: {reason}");
        }
        other => panic!("{name}, {what}: {other:?}"),
    }
}

#[test]
fn a_changed_byte_in_a_small_file_is_detected() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    for name in names(&checkpoint).iter().filter(|name| !name.ends_with(".safetensors")) {
        let path = checkpoint.join(name);
        let mut bytes = fs::read(&path).unwrap();
        for byte in 0..bytes.len() {
            // A flipped bit, and a space in place of the byte.
            for replacement in [bytes[byte] ^ 1, b' '] {
                let original = std::mem::replace(&mut bytes[byte], replacement);
                if original != replacement {
                    fs::write(&path, &bytes).unwrap();
                    assert_corrupted(&checkpoint, name, &format!("byte {byte} became {replacement}"));
                }
                bytes[byte] = original;
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
    verify(&checkpoint, &CancelToken::new()).unwrap();
}

#[test]
fn a_flipped_bit_in_a_tensor_is_never_restored() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let path = checkpoint.join(name);
        let mut bytes = fs::read(&path).unwrap();
        for bit in scattered(400, bytes.len() * 8) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).unwrap();
            assert_corrupted(&checkpoint, name, &format!("bit {bit}"));
            let error = Tiny::zeros(Precision::Fp32).restore(&checkpoint).unwrap_err();
            assert_eq!(error.exit_code(), 5, "bit {bit}: {error}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        fs::write(&path, &bytes).unwrap();
    }
    verify(&checkpoint, &CancelToken::new()).unwrap();
}

#[test]
fn a_truncated_extended_or_missing_file_is_named() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    for name in names(&checkpoint) {
        let path = checkpoint.join(&name);
        let bytes = fs::read(&path).unwrap();
        for length in scattered(25, bytes.len()).chain([0, bytes.len() - 1]) {
            fs::write(&path, &bytes[..length]).unwrap();
            assert_corrupted(&checkpoint, &name, &format!("cut to {length}"));
        }
        fs::write(&path, [bytes.as_slice(), b"\n"].concat()).unwrap();
        assert_corrupted(&checkpoint, &name, "a line longer");
        fs::remove_file(&path).unwrap();
        assert_corrupted(&checkpoint, &name, "gone");
        fs::write(&path, &bytes).unwrap();
    }
    verify(&checkpoint, &CancelToken::new()).unwrap();
}

#[test]
fn a_manifest_with_paths_outside_is_refused() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    let record = FileRecord { bytes: 0, sha256: String::new() };
    let manifest = Manifest::new(1, BTreeMap::from([("../../secret".to_owned(), record)]));
    fs::write(checkpoint.join("MANIFEST.json"), manifest.to_bytes()).unwrap();
    assert_corrupted(&checkpoint, "secret", "a path in the manifest");
}
