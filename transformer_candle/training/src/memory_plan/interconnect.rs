//! The links between the ranks of a run, and the time of a step that its exchange takes.

use std::str::FromStr;

use serde::Serialize;

use crate::ranks::RankInfo;

/// A link of each rank to the others, and the bytes per second that collectives sustain over it in each direction,
/// pessimistic and optimistic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// The name for people.
    pub name: &'static str,
    /// Bytes per second in one direction while the other is busy as well.
    pub bytes_per_second: [f64; 2],
}

/// 31.5 GB/s nominal. GeForce GPUs have no peer-to-peer access: NCCL goes through host memory. A bus bandwidth of 24.7
/// GB/s is published for four RTX 4090 whose driver was patched to have it
/// (github.com/tinygrad/open-gpu-kernel-modules/issues/17); a third of that without is an estimate.
pub const PCIE_4: Link = Link { name: "PCIe 4.0 x16", bytes_per_second: [8e9, 24e9] };
/// 63 GB/s nominal. Eight H100 on PCIe without NVLink are published at a bus bandwidth of 35 to 45 GB/s, with peer-to-peer
/// access; without, the pessimistic rate is that of [`PCIE_4`] twice as fast.
pub const PCIE_5: Link = Link { name: "PCIe 5.0 x16", bytes_per_second: [16e9, 40e9] };
/// 300 GB/s nominal; eight A100 SXM are published at a bus bandwidth of 230 to 250 GB/s.
pub const NVLINK_3: Link = Link { name: "NVLink 3", bytes_per_second: [200e9, 240e9] };
/// 450 GB/s nominal; the optimistic rate is the share of it that `NVLINK_3` reaches. Sums inside the switch (NVLink SHARP),
/// which reach 460 to 480 GB/s, are not assumed.
pub const NVLINK_4: Link = Link { name: "NVLink 4", bytes_per_second: [300e9, 360e9] };
/// gloo over loopback, from docs/experiments/ranks.md: what two ranks take longer than one process on idle cores, 13 to 20 ms
/// for 9.4 MB each way.
pub const LOOPBACK: Link = Link { name: "loopback (gloo)", bytes_per_second: [0.47e9, 0.73e9] };

/// The fractions of a rate given as `--interconnect` that collectives sustain.
const NOMINAL_FRACTIONS: [f64; 2] = [0.7, 0.9];

/// The nominal rate of a network in each direction, such as `400Gb/s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interconnect {
    bytes_per_second: f64,
}

impl FromStr for Interconnect {
    type Err = String;

    /// Parses `400Gb/s` (bits) or `50GB/s` (bytes).
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "must be a rate such as `400Gb/s` (bits) or `50GB/s` (bytes)".to_owned();
        let units = [("Tb/s", 1e12 / 8.0), ("Gb/s", 1e9 / 8.0), ("Mb/s", 1e6 / 8.0), ("GB/s", 1e9), ("MB/s", 1e6)];
        let (number, unit) =
            units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit))).ok_or_else(wrong)?;
        match number.trim().parse::<f64>() {
            Ok(number) if number.is_finite() && number > 0.0 => Ok(Self { bytes_per_second: number * unit }),
            _ => Err(wrong()),
        }
    }
}

/// The slowest link between the ranks, by which a plan predicts their exchange.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Network {
    /// The name of the slowest link on the ring of all ranks, for people.
    pub(super) name: String,
    bytes_per_second: [f64; 2],
}

impl Network {
    /// The network of ranks on `nodes` machines: `link` connects those of a machine, `interconnect` the machines. On
    /// one machine `interconnect` replaces `link`.
    ///
    /// Collectives pass around a ring of all ranks, which enters and leaves each machine once: its slowest link bounds
    /// them.
    pub(super) fn new(link: Link, nodes: usize, interconnect: Option<Interconnect>) -> Self {
        let inside = Self { name: link.name.to_owned(), bytes_per_second: link.bytes_per_second };
        let Some(Interconnect { bytes_per_second: nominal }) = interconnect else { return inside };
        let network = Self {
            name: format!("{} Gb/s", (nominal * 8e-9 * 100.0).round() / 100.0),
            bytes_per_second: NOMINAL_FRACTIONS.map(|fraction| fraction * nominal),
        };
        if nodes == 1 || network.bytes_per_second[1] < inside.bytes_per_second[1] { network } else { inside }
    }

    /// Returns the seconds in which each rank sends and receives so many bytes.
    pub(super) fn seconds(&self, bytes_per_rank: f64) -> [f64; 2] {
        self.bytes_per_second.map(|rate| bytes_per_rank / rate)
    }
}

/// Bytes of an element of the gradients.
pub(super) const GRADIENT_BYTES: usize = 4;

/// Bytes that each rank sends and receives in a step: the f32 gradients are summed on the rank of each shard
/// (reduce-scatter), and its weights, of `weight` bytes, return to all (all-gather).
pub(super) fn bytes_per_rank(elements: usize, weight: usize, rank_info: RankInfo) -> f64 {
    let ranks = rank_info.world_size as f64;
    (ranks - 1.0) / ranks * (GRADIENT_BYTES + weight) as f64 * elements as f64
}

/// The exchange of a step between ranks, and what it does to the speed. Ranges are pessimistic first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExchangeSpeed {
    /// The slowest link.
    pub link: String,
    /// Bytes that each rank sends, and receives, in a step.
    pub bytes_per_rank: f64,
    /// Seconds that the exchange takes per step.
    pub seconds: [f64; 2],
    /// Seconds of these in which nothing is computed: gradients are exchanged beside the backward pass of the step's
    /// last micro-batch, as far as it is long enough.
    pub exposed_seconds: [f64; 2],
    /// Scaling efficiency: tokens per second over those of as many processes that exchange nothing.
    pub efficiency: [f64; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    }

    #[test]
    fn a_rate_is_in_bits_or_bytes() {
        let rate = |text: &str| text.parse::<Interconnect>().map(|rate| rate.bytes_per_second);
        near(rate("400Gb/s").unwrap(), 50e9);
        near(rate("50 GB/s").unwrap(), 50e9);
        near(rate("3.2Tb/s").unwrap(), 400e9);
        for wrong in ["400", "400Gbps", "-1Gb/s", "Gb/s", "nanGB/s", "0Gb/s", "infGb/s"] {
            assert!(rate(wrong).unwrap_err().contains("400Gb/s"), "{wrong}");
        }
    }

    #[test]
    fn ranks_send_and_receive_all_but_their_own_part() {
        let of = |world_size, weight| {
            bytes_per_rank(1000, weight, RankInfo { rank: 0, world_size, local_rank: 0, local_world_size: world_size })
        };
        near(of(2, 2), 3000.0);
        near(of(4, 2), 4500.0);
        near(of(2, 4), 4000.0);
        assert!(of(1, 2).abs() < 1e-9);
    }

    #[test]
    fn the_slowest_link_bounds_the_exchange() {
        let rate = |text: &str| Some(text.parse().unwrap());
        assert_eq!(Network::new(NVLINK_4, 1, None).name, "NVLink 4");
        assert_eq!(Network::new(NVLINK_4, 8, rate("400Gb/s")).name, "400 Gb/s");
        assert_eq!(Network::new(PCIE_4, 8, rate("3.2Tb/s")).name, "PCIe 4.0 x16");
        let network = Network::new(PCIE_4, 1, rate("50GB/s"));
        near(network.seconds(90e9)[1], 2.0);
        near(network.seconds(70e9)[0], 2.0);
    }
}
