import { findMember, scanArray, scanObject } from '../core/json-scan.ts';

/** One entry of an engine's `GET /v1/models` list. */
export interface EngineModelCard {
  readonly id: string;
  /** Empty where the card has none. */
  readonly root: string;
  /** Id of the base model of an adapter; empty where the card has none. */
  readonly parent: string;
  /** Context window in tokens. */
  readonly maxModelLen?: number;
  /** The card as the engine wrote it, white space included. */
  readonly rawJson: string;
}

/**
 * Reads the cards of an OpenAI models list; entries without a string `id` are left out.
 * Undefined where the text is no such list at all.
 */
export function parseModelCards(text: string): readonly EngineModelCard[] | undefined {
  const bytes = new TextEncoder().encode(text);
  const list = scanObject(bytes);
  if (list.kind !== 'object') return undefined;
  const data = findMember(list, 'data');
  if (data?.type !== 'array') return undefined;
  const elements = scanArray(bytes, data.valueStart, data.valueEnd);
  if (elements === undefined) return undefined;
  const decoder = new TextDecoder();
  return elements.flatMap(({ valueStart, valueEnd }) => {
    const card = parseCard(decoder.decode(bytes.subarray(valueStart, valueEnd)));
    return card === undefined ? [] : [card];
  });
}

function parseCard(rawJson: string): EngineModelCard | undefined {
  const card: unknown = JSON.parse(rawJson);
  if (typeof card !== 'object' || card === null || !('id' in card)) return undefined;
  const { id } = card;
  if (typeof id !== 'string' || id === '') return undefined;
  const maxModelLen = 'max_model_len' in card ? card.max_model_len : undefined;
  return {
    id,
    root: 'root' in card && typeof card.root === 'string' ? card.root : '',
    parent: 'parent' in card && typeof card.parent === 'string' ? card.parent : '',
    ...(isUint32(maxModelLen) ? { maxModelLen } : {}),
    rawJson,
  };
}

function isUint32(value: unknown): value is number {
  return typeof value === 'number' && Number.isInteger(value) && value > 0 && value <= 0xffff_ffff;
}
