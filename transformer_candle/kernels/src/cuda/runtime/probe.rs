//! The GPUs of this machine, without opening one.

use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::result::{device, init};
use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute as Attribute, CUresult};

use super::failure::sentence;
use super::libraries;
use crate::cuda::Gpu;

/// The GPUs that the driver lists, numbered from 0; at least one. Opens no context, and takes no memory of a GPU.
///
/// # Errors
/// The one sentence that says what is missing, and the way out.
pub fn probe() -> Result<Vec<Gpu>, String> {
    libraries::load()?;
    let gpus = list().map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => "the NVIDIA driver lists no GPU".to_owned(),
        _ => format!("the NVIDIA driver does not answer: {}", sentence(error)),
    })?;
    if gpus.is_empty() { Err("the NVIDIA driver lists no GPU".to_owned()) } else { Ok(gpus) }
}

fn list() -> Result<Vec<Gpu>, DriverError> {
    init()?;
    let [major, minor, _] = libraries::cublas_version().map(i32::cast_unsigned);
    (0..device::get_count()?).map(|ordinal| gpu(ordinal, (major, minor))).collect()
}

fn gpu(ordinal: i32, cublas: (u32, u32)) -> Result<Gpu, DriverError> {
    let found = device::get(ordinal)?;
    // SAFETY: the driver gave this device.
    let (total_bytes, major, minor) = unsafe {
        let attribute = |attribute| device::get_attribute(found, attribute);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        (device::total_mem(found)?, major, attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
    };
    let compute_capability = (major.cast_unsigned(), minor.cast_unsigned());
    let (ordinal, name) = (ordinal.cast_unsigned() as usize, device::get_name(found)?);
    let uuid = written(name.contains(" MIG "), device::get_uuid(found)?.bytes.map(|byte| byte as u8));
    Ok(Gpu { ordinal, name, uuid, total_bytes: total_bytes as u64, compute_capability, cublas })
}

/// A UUID as `nvidia-smi -L` writes it.
fn written(is_slice: bool, bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|places| &digits[places]);
    format!("{}-{}", if is_slice { "MIG" } else { "GPU" }, groups.join("-"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn uuids_are_written_as_nvidia_smi_does() {
        let bytes = std::array::from_fn(|place| (place as u8) << 4 | place as u8);
        assert_eq!(super::written(false, bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(super::written(true, [0; 16]), "MIG-00000000-0000-0000-0000-000000000000");
    }
}
