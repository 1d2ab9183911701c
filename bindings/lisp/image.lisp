;;;; What becomes of open handles when the image is saved, or the process exits.

(in-package #:pelton)

(defun flushes-p (handle)
  (typep handle '(or appenders flushing)))

(defun before-saving ()
  "Closes everything: a saved image has none of this process's memory or descriptors. What flushes comes first, since a sink may use another handle."
  (let ((handles (loop for handle being the hash-keys of *handles* collect handle)))
    (dolist (handle (stable-sort handles (lambda (one other) (and (flushes-p one) (not (flushes-p other))))))
      (let ((closed (close-quietly handle)))
        (unless (eql closed 0) (warn "closing ~a: ~a" handle closed))))))

(defun before-exit ()
  "Has the sinks take what was appended. Nothing is closed: other threads run still."
  (dolist (handle (loop for handle being the hash-keys of *handles* when (typep handle 'appenders) collect handle))
    (let ((synced (attempt (%sync (handle-address handle)))))
      (unless (eql synced 0) (warn "flushing ~a: ~a" handle synced)))))

(defun after-loading ()
  (setf *missing* nil)
  (handler-case (progn (load-library) (check-version))
    (error (condition)
      (setf *missing* (princ-to-string condition))
      (warn "pelton: ~a" condition))))

(pushnew 'before-saving sb-ext:*save-hooks*)
(pushnew 'before-exit sb-ext:*exit-hooks*)
(pushnew 'after-loading sb-ext:*init-hooks*)
