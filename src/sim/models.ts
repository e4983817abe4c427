import { ApiError } from './api-error.ts';
import { hashText, toHex } from './hash.ts';
import type { JsonObject } from './json.ts';
import type { ServedModel, SimConfig } from './options.ts';

/** The served model of a name; throws the engine's 404. No name means the first model. */
export function findModel(config: SimConfig, name: unknown): ServedModel {
  const found =
    name === undefined || name === null ? config.models[0] : config.models.find((model) => model.id === name);
  if (found !== undefined) return found;
  const aliases = config.models
    .filter((model) => model.parent === null)
    .map((model) => model.id)
    .join(', ');
  throw new ApiError(
    404,
    `The model \`${String(name)}\` does not exist. Valid aliases: ${aliases}.`,
    'NotFoundError',
    'model',
  );
}

/** Body of GET /v1/models. */
export function listModels(config: SimConfig, created: number): JsonObject {
  const data = config.models.map((model) => ({
    id: model.id,
    object: 'model',
    created,
    owned_by: 'vllm',
    root: model.root,
    parent: model.parent,
    max_model_len: model.parent === null ? config.maxModelLen : null,
    permission: [
      {
        id: `modelperm-${toHex(hashText(model.id))}`,
        object: 'model_permission',
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: '*',
        group: null,
        is_blocking: false,
      },
    ],
  }));
  return { object: 'list', data };
}

/** The `system_fingerprint` of a configuration. */
export function fingerprintOf(config: SimConfig): string {
  return `vllm-${config.version}-${toHex(hashText(`${config.connector} ${config.blockSize}`)).slice(0, 8)}`;
}
