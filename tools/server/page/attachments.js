// The images of the next message: pasted, dropped or chosen, with previews.

import { announce, button, element, find } from "./dom.js";

const MAX_SIDE = 2048; // pixels of a side; larger images are made smaller before they are sent
const MAX_FILE = 4 * 2 ** 20; // largest number of bytes of a file that is sent unchanged
export const MAX_IMAGES = 16; // number of images; the server's limit for a request
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

export class Attachments {
  /** `tell(text)` shows an error. */
  constructor(tell) {
    this.tell = tell;
    this.images = []; // {blob, url, element}
    this.isOn = false;
    this.list = find("attachments");
    const input = find("attach-file");
    find("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => (this.add([...input.files]), (input.value = "")));
    find("input").addEventListener("paste", (event) => this.take(event, event.clipboardData));
    document.addEventListener("dragover", (event) => this.isOn && hasFiles(event) && event.preventDefault());
    document.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  allow(isOn) {
    this.isOn = isOn;
    find("attach").hidden = !isOn;
    if (!isOn) this.clear();
  }

  take(event, data) {
    const files = [...(data?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!this.isOn || !files.length) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of files) {
      if (this.images.length >= MAX_IMAGES) {
        this.tell(`A message has at most ${MAX_IMAGES} images.`);
        return;
      }
      try {
        this.show(await shrunk(file), file.name);
      } catch {
        this.tell(`${file.name} is not an image that this browser can read.`);
      }
    }
  }

  show(blob, name) {
    const image = { blob, url: URL.createObjectURL(blob) };
    const remove = () => {
      this.images = this.images.filter((one) => one !== image);
      image.element.remove();
      URL.revokeObjectURL(image.url);
      this.list.hidden = !this.images.length;
      find("input").focus();
    };
    image.element = element(
      "li",
      {},
      element("img", { src: image.url, alt: name || "image" }),
      button("×", remove, { className: "small", "aria-label": `Remove ${name || "the image"}` }),
    );
    this.images.push(image);
    this.list.append(image.element);
    this.list.hidden = false;
    announce(`Attached ${name || "an image"}`);
  }

  /** Return the images, and begin the next message without images. */
  clear() {
    const blobs = this.images.map((image) => image.blob);
    for (const image of this.images) URL.revokeObjectURL(image.url);
    this.images = [];
    this.list.replaceChildren();
    this.list.hidden = true;
    return blobs;
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

/** Return the file, or a smaller WebP image if the file is large. Throws an error if it is not an image. */
async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_FILE && TYPES.includes(file.type)) return file;
  const canvas = element("canvas", {
    width: Math.max(1, Math.round(scale * bitmap.width)),
    height: Math.max(1, Math.round(scale * bitmap.height)),
  });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/webp", 0.92));
  if (!blob) throw new Error("no image");
  return blob;
}
