//! Executes AMX's instructions on a processor that does not have them: a handler of SIGILL reads the instruction and
//! does what Intel's manual says it does, volumes 2A and 2B. A processor with AMX never calls it.

use std::cell::RefCell;
use std::sync::Once;

use libc::{c_int, c_void, siginfo_t, ucontext_t};

/// Bits of a tile register: rows of 16 words.
type Tile = [[u32; 16]; 16];

/// The tile registers of a thread.
struct Registers {
    /// Rows and words of a row of each tile, as configured; None before `ldtilecfg` and after `tilerelease`.
    shapes: Option<[(usize, usize); 8]>,
    tiles: [Tile; 8],
}

thread_local! {
    static REGISTERS: RefCell<Registers> = const { RefCell::new(Registers { shapes: None, tiles: [[[0; 16]; 16]; 8] }) };
}

/// Makes this process execute AMX's instructions.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is async-signal-safe: it touches the registers of its thread, and allocates nothing.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut())
        };
        assert_eq!(installed, 0);
    });
}

extern "C" fn handle(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes the registers of the thread; its code and operands are readable.
    unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let instruction = Instruction::read(registers);
        REGISTERS.with_borrow_mut(|tiles| instruction.execute(tiles));
        registers[libc::REG_RIP as usize] += instruction.length as i64;
    }
}

/// An instruction with a VEX prefix of three bytes.
struct Instruction {
    opcode: u8,
    /// What the prefix stands for: nothing, 66, F3 or F2.
    prefix: u8,
    /// The register operands: of `ModRM.reg`, of `ModRM.rm` where that is a register, and of `VEX.vvvv`.
    registers: [usize; 3],
    /// The memory operand: its address, and from row to row in bytes.
    memory: Option<(usize, usize)>,
    length: usize,
}

impl Instruction {
    /// # Safety
    /// The instruction pointer is valid.
    unsafe fn read(gregs: &[i64]) -> Self {
        // SAFETY: no instruction has more than 15 bytes, and code follows those of AMX.
        let code = unsafe { std::slice::from_raw_parts(gregs[libc::REG_RIP as usize] as *const u8, 11) };
        let [0xc4, first, second, opcode, modrm, ..] = *code else {
            unreachable!("an illegal instruction that is not AMX's: {code:x?}");
        };
        assert_eq!(first & 0x1f, 2, "not in the opcode map of AMX: {code:x?}");
        let extended = |bit: u8| usize::from(first >> bit & 1 == 0) << 3;
        let (rm, reg) = (usize::from(modrm & 7), usize::from(modrm >> 3 & 7));
        let (mut length, mut memory) = (5, None);
        if modrm >> 6 < 3 {
            let (mut base, mut stride) = (rm | extended(5), 0);
            if rm == 4 {
                let sib = code[5];
                length = 6;
                base = usize::from(sib & 7) | extended(5);
                let index = usize::from(sib >> 3 & 7) | extended(6);
                stride = if index == 4 { 0 } else { general(gregs, index) << (sib >> 6) };
            }
            let displacement = match modrm >> 6 {
                0 => {
                    assert_ne!(base & 7, 5, "relative to the instruction: {code:x?}");
                    0
                }
                1 => {
                    length += 1;
                    i64::from(code[length - 1].cast_signed())
                }
                _ => {
                    length += 4;
                    i64::from(i32::from_le_bytes(*code[length - 4..].first_chunk().expect("four bytes")))
                }
            };
            memory = Some((general(gregs, base).wrapping_add_signed(displacement as isize), stride));
        }
        let vvvv = usize::from(!second >> 3 & 15);
        Self { opcode, prefix: second & 3, registers: [reg, rm, vvvv], memory, length }
    }

    /// # Safety
    /// The memory operand is valid.
    unsafe fn execute(&self, on: &mut Registers) {
        let [reg, rm, vvvv] = self.registers;
        if (self.opcode, self.prefix, self.memory.is_some()) == (0x49, 0, true) {
            // SAFETY: `ldtilecfg` reads 64 bytes.
            let config = unsafe { *(self.memory.expect("checked above").0 as *const [u8; 64]) };
            assert_eq!(config[0], 1, "the palette");
            let bytes = |tile: usize| usize::from(config[16 + 2 * tile]) + 256 * usize::from(config[17 + 2 * tile]);
            on.shapes = Some(std::array::from_fn(|tile| (usize::from(config[48 + tile]), bytes(tile) / 4)));
            on.tiles = [[[0; 16]; 16]; 8];
            return;
        }
        let shapes = on.shapes.expect("the tiles are configured");
        match (self.opcode, self.prefix, self.memory) {
            (0x49, 0, None) => on.shapes = None,
            (0x49, 3, None) => on.tiles[reg] = [[0; 16]; 16],
            (0x4b, prefix @ (2 | 3), Some((address, stride))) => {
                let (rows, words) = shapes[reg];
                for row in 0..rows {
                    let (memory, tile) = ((address + row * stride) as *mut u32, on.tiles[reg][row].as_mut_ptr());
                    // SAFETY: as promised by the caller; a row of a tile holds 16 words.
                    unsafe {
                        if prefix == 3 {
                            tile.copy_from(memory, words);
                        } else {
                            memory.copy_from(tile, words);
                        }
                    }
                }
            }
            (0x5c, 2, None) => {
                assert!(shapes[reg] == (shapes[rm].0, shapes[vvvv].1) && shapes[rm].1 == shapes[vvvv].0);
                let (a, b) = (on.tiles[rm], on.tiles[vvvv]);
                multiply(&mut on.tiles[reg], &a, &b, [shapes[reg].0, shapes[reg].1, shapes[rm].1]);
            }
            _ => unreachable!("not an instruction of AMX that is emulated: {:x} {:x}", self.opcode, self.prefix),
        }
    }
}

/// The value of a general register by its number in an instruction.
fn general(gregs: &[i64], number: usize) -> usize {
    const NUMBERS: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    gregs[NUMBERS[number] as usize] as usize
}

/// `tdpbf16ps` of M rows, N columns and K words: the first elements of the words have a sum of their own, and so have
/// the second ones. A product of two bf16 is exact in f32, so that no multiply-add is needed; unlike the processor, it
/// does not take subnormal numbers for zero.
fn multiply(sums: &mut Tile, a: &Tile, b: &Tile, [m, n, k]: [usize; 3]) {
    let halves = |word: u32| [word << 16, word & 0xffff_0000].map(f32::from_bits);
    let b = b.map(|row| row.map(halves));
    for row in 0..m {
        let mut partial = [[0f32; 2]; 16];
        for word in 0..k {
            let a = halves(a[row][word]);
            for (partial, b) in partial.iter_mut().zip(&b[word]) {
                partial[0] += a[0] * b[0];
                partial[1] += a[1] * b[1];
            }
        }
        for (sum, [first, second]) in sums[row][..n].iter_mut().zip(partial) {
            *sum = (f32::from_bits(*sum) + (first + second)).to_bits();
        }
    }
}
