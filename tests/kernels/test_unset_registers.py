"""The check of machine code for registers that nothing has set."""

from __future__ import annotations

from unset_registers import unset_registers

CODE = """
        /*0000*/                   S2UR UR9, SR_CgaCtaId ;
        /*0010*/                   UMOV UR4, 0x400 ;
        /*0020*/                   ULEA UR4, UR9, UR4, 0x18 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   ULDC.64 UR6, c[0x0][0x210] ;
.L_x_1:
        /*0050*/                   UIADD3 UR8, UP0, UR28, 0x20, URZ ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   HGMMA.64x16x16.F32.BF16 R88, R28, gdesc[UR2].tnspB, R88 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""


def test_registers_that_no_way_writes() -> None:
    found = unset_registers(CODE)
    assert [one.split()[0] for one in found] == ["0050", "0060", "0070"]


def test_registers_that_some_way_writes() -> None:
    """A register of one branch, or of the turn of a loop before, is taken for set."""
    whole = CODE.replace("UMOV UR4, 0x400", "ULDC.64 UR4, c[0x0][0x208]").replace("UR28", "UR8")
    assert [one.split()[0] for one in unset_registers(whole)] == []
