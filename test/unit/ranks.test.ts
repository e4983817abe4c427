import { describe, expect, test } from 'vitest';
import { pickRank } from '../../src/core/ranks.ts';

describe('pickRank', () => {
  test('a leg outside any conversation goes to the idlest rank', () => {
    expect([pickRank([0, 0], ''), pickRank([2, 1, 3], ''), pickRank([5], '')]).toEqual([0, 1, 0]);
  });

  test('a conversation keeps its rank until that has more than its share', () => {
    const home = pickRank([0, 0, 0, 0], 't\nc');
    expect(pickRank([4, 4, 4, 4], 't\nc')).toBe(home);
    const full = [4, 4, 4, 4].with(home, 6);
    expect(pickRank(full, 't\nc')).toBe((home + 1) % 4);
  });

  test('conversations are spread over all ranks, and none gets more than its share', () => {
    const legs = [0, 0, 0, 0];
    for (let i = 0; i < 400; i++) {
      const rank = pickRank(legs, `t\n${i}`);
      legs[rank] = (legs[rank] ?? 0) + 1;
    }
    expect(Math.max(...legs)).toBeLessThanOrEqual(125);
  });
});
