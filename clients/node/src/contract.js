/**
 * The contract, loaded from the .proto files at run time.
 *
 * Field names are camelCase, enums are their names, 64-bit numbers are JavaScript numbers: those
 * that this client uses stay below 2^53. The few others (PROTOCOL.md, "Conventions") come rounded.
 */

import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTO_ROOT = fileURLToPath(new URL('../../../protos', import.meta.url));

const definition = protoLoader.loadSync(
  ['types', 'scheduler', 'parameters'].map((name) => `pushpull/v1/${name}.proto`),
  {
    includeDirs: [PROTO_ROOT],
    longs: Number,
    enums: String,
    defaults: true,
    oneofs: true,
  },
);

/** @type {any} */
const loaded = grpc.loadPackageDefinition(definition);

export const SchedulerService = loaded.pushpull.v1.SchedulerService;
export const ParameterService = loaded.pushpull.v1.ParameterService;

/**
 * The codec of one message type, for metadata and for tests.
 *
 * @param {string} name such as 'Error'
 * @returns {{serialize: (value: object) => Buffer, deserialize: (bytes: Buffer) => any}}
 */
export function messageType(name) {
  return /** @type {any} */ (definition[`pushpull.v1.${name}`]);
}
