;;;; What happens to open handles when the image is saved, or the process exits.

(in-package #:pelton)

(defun before-saving ()
  "Closes everything: a saved image has none of this process's memory or descriptors. Flushes come first, since a sink
may use another handle."
  (flet ((flushes-p (handle) (typep handle '(or appenders flush))))
    (dolist (handle (stable-sort (loop for handle being the hash-keys of *handles* collect handle)
                                 (lambda (one other) (and (flushes-p one) (not (flushes-p other))))))
      (let ((closed (close-quietly handle)))
        (unless (eql closed +ok+) (warn "closing ~a: ~a" handle closed))))))

(defun before-exit ()
  "Flushes appenders. Closes nothing, because other threads still run."
  (dolist (handle (loop for handle being the hash-keys of *handles* when (typep handle 'appenders) collect handle))
    (let ((synced (attempt (%appenders-sync (handle-address handle)))))
      (unless (eql synced +ok+) (warn "flushing ~a: ~a" handle synced)))))

(defun after-loading ()
  (setf *missing* nil)
  (handler-case (progn (load-library) (check-version))
    (error (condition)
      (setf *missing* (princ-to-string condition))
      (warn "pelton: ~a" condition))))

(pushnew 'before-saving sb-ext:*save-hooks*)
(pushnew 'before-exit sb-ext:*exit-hooks*)
(pushnew 'after-loading sb-ext:*init-hooks*)
