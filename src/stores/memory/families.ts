import { joinUnambiguously } from '../entry.ts';
import type { NewEntry } from '../store.ts';

/** What many entries say alike. */
export interface Family {
  readonly tenant: string;
  readonly model: string;
  readonly adapter: string;
  readonly owner: NewEntry['owner'];
  readonly connector: string;
}

interface Kept {
  readonly id: string;
  readonly family: Family;
  members: number;
}

/** One object in place of many equal ones, known by a number, for as long as an entry has need of it. */
export class Families {
  readonly #numbers = new Map<string, number>();
  readonly #kept: (Kept | undefined)[] = [];
  readonly #free: number[] = [];

  /** The number of the family, which has one member more. */
  join(family: Family): number {
    const id = idOf(family);
    const known = this.#numbers.get(id);
    const kept = known === undefined ? undefined : this.#kept[known];
    if (known !== undefined && kept !== undefined) {
      kept.members += 1;
      return known;
    }
    const number = this.#free.pop() ?? this.#kept.length;
    this.#kept[number] = { id, family, members: 1 };
    this.#numbers.set(id, number);
    return number;
  }

  get(number: number): Family {
    return this.#of(number).family;
  }

  /** One member less; the number of a family without any is given to another. */
  leave(number: number): void {
    const kept = this.#of(number);
    kept.members -= 1;
    if (kept.members > 0) return;
    this.#kept[number] = undefined;
    this.#numbers.delete(kept.id);
    this.#free.push(number);
  }

  #of(number: number): Kept {
    const kept = this.#kept[number];
    if (kept === undefined) throw new Error('a family is looked for that is not kept');
    return kept;
  }
}

function idOf({ tenant, model, adapter, owner, connector }: Family): string {
  const { instanceId, engineId, compatGroup, life } = owner;
  const { processStartSeconds = '', generation } = life;
  const lifeText = `${generation} ${processStartSeconds}`;
  return joinUnambiguously([
    tenant,
    model,
    adapter,
    connector,
    instanceId,
    engineId,
    compatGroup,
    life.engineId,
    lifeText,
  ]);
}
